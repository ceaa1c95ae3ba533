"""Layers x experts: how much each is used, and where it is."""
