"""How many bytes the engine takes for what: the arithmetic that the plan and the running engine share.

Whoever allocates in `engine.experts` and `engine.runtime` takes these numbers from here, so that what is predicted and
what is held cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable

PART_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load."""
RECORD_ALIGNMENT = 4096
"""Bytes: a page, so that a record can be read from disk directly and pinned by itself."""

SEGMENTS = 8
"""Pieces of a global pool of expert slots: it gives memory back by the piece."""
STAGED = 3
"""Slots for experts that are fetched to be computed at once: one computes, one arrives, one waits."""

CARD_HEADROOM_BYTES = 2**30
"""Of a card: left to the driver, to torch's own workspaces and to the desktop."""
_RAM_HEADROOM_BYTES = 512 * 2**20

KV_TOKENS = 1024
"""Context for which there is room from the start.  A longer one takes its memory from the expert cache."""
ROOMY_KV_TOKENS = 8192
"""The same where all experts are on the device: they do not give way, unless a longer context was asked for."""
FEWEST_KV_TOKENS = 256
"""A device without room for so much context is of no use."""

SHORT_TOKENS = 256
"""A piece of a prompt where all weights are at hand: bounds the memory of activations."""
LONG_TOKENS = 2048
"""The same where experts come over a link or from disk: each piece brings them once."""
_TOKENS_PER_EXPERT = 64
"""From about so many on, a matrix product is bound by arithmetic and no longer by reading the weights."""
_SHORTEST = 32
_SHARE = 4
"""A piece's activations may take one part in so many of what a device has left beside the dense weights."""


def round_up(value: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-value // to) * to


def record_bytes(parts: Iterable[int]) -> int:
    """Bytes of an expert's record from those of its parts, padding counted."""
    offset = 0
    for nbytes in parts:
        offset = round_up(offset + nbytes, PART_ALIGNMENT)
    return round_up(offset, RECORD_ALIGNMENT)


def pool_segment_slots(slots: int, most: int, ways: int | None) -> int:
    """Slots of each piece of a pool that is to have `slots` of the `most` that are of use."""
    return ways or max(min(2, slots, most), 1, min(slots, most) // SEGMENTS)


def pool_segments(slots: int, segment_slots: int, layers: int, most: int, ways: int | None) -> int:
    """How many pieces hold at most `slots` slots, where all of them are of use."""
    if ways is not None:
        return min(max(slots, 0) // ways, layers)
    return min(max(slots, 0), most + segment_slots - 1) // segment_slots


def staging_slots(budget: int, record: int, misses: str, cache_slots: int | None) -> int:
    """Slots beside the cache's, for experts that are fetched to be computed at once."""
    if misses == "layer" or (misses == "cpu" and cache_slots == 0):
        return 0
    return min(STAGED, budget // record)


def activation_token_bytes(hidden: int, experts_per_token: int, width: int = 2) -> int:
    """Bytes that a token of a piece takes at the most, by a rough count of the tensors that live at once.

    Residual, norms and projections are some ten of the hidden width; experts have a row of fp32 for each choice.

    Args:
        width: bytes of a number.
    """
    return hidden * (10 * width + 4 * max(experts_per_token, 1))


def piece_tokens(room: int, per_token: int, context_tokens: int) -> int:
    """The longest piece of a prompt whose activations leave most of `room` bytes to others."""
    fitting = room // (_SHARE * max(per_token, 1))
    return max(_SHORTEST, min(LONG_TOKENS, fitting, context_tokens))


def piece_room(room: int, per_token: int, context_tokens: int) -> int:
    """Bytes that are kept for the activations of such a piece.

    Up to a token's more than it takes: so what is left to others grows with `room`, where whole tokens would take
    from it at every step.
    """
    longest = max(_SHORTEST, min(LONG_TOKENS, context_tokens)) * per_token
    return max(_SHORTEST * per_token, min(longest, room // _SHARE))


def piece_tokens_in_ram(experts: int, experts_per_token: int) -> int:
    """The length of a piece whose weights all lie in RAM: each expert gets enough tokens for its weights' way."""
    if not experts_per_token:
        return SHORT_TOKENS
    return max(SHORT_TOKENS, min(LONG_TOKENS, _TOKENS_PER_EXPERT * experts // experts_per_token))


def without_headroom(free: int) -> int:
    """Of so many free bytes of RAM those that weights may take: the rest is for activations, KV and the program."""
    return free - min(_RAM_HEADROOM_BYTES, free // 10)
