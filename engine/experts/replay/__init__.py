"""Replay of recorded routing: what any cache policy and size would have hit, and the best that any could."""
