"""Replay of recorded routing: the hits of any cache policy and size, and the upper bound for all."""
