"""Caches of keys and values: layers that grow in place, their memory, and what may be done to them."""
