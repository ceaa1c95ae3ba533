"""Shared by every other package; imports neither torch nor any of them."""
