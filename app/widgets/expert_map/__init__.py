"""Layers x experts: how often each is used, and where it is stored."""
