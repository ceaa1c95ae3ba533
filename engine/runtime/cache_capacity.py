"""How far ahead a cache layer that grows in place allocates."""

from __future__ import annotations

_FIRST_CAPACITY = 256


def grown_capacity(held: int, tokens: int, most_tokens: int | None = None) -> int:
    """Tokens that there is room for once a layer that was full with `held` has been made to hold `tokens`."""
    capacity = max(_FIRST_CAPACITY, 2 * held, tokens)
    return capacity if most_tokens is None else max(tokens, min(capacity, most_tokens))
