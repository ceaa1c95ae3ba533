"""Memory arithmetic shared by the planner and the running engine.

Code in `engine.experts` and `engine.runtime` that allocates takes these numbers from here, so predicted and actual
sizes cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable

PART_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load."""
RECORD_ALIGNMENT = 4096
"""Bytes: a page, so that a record can be read from disk directly and pinned by itself."""

SEGMENTS = 8
"""Segments of a global pool of expert slots: it frees memory by the segment."""
FEWEST_STAGED = 3
"""Slots for experts fetched for immediate use: one computing, one arriving, one waiting."""
MOST_STAGED = 32
"""The same for prompts: sixteen are computed by one launch while as many arrive.  More would hide no more."""
_STAGED_SHARE = 16
"""They take one part in so many of the memory for experts: what they take is lost to the cache."""

CARD_HEADROOM_BYTES = 2**30
"""Bytes of a card left to the driver, torch's workspaces and the desktop."""
_RAM_HEADROOM_BYTES = 512 * 2**20

KV_TOKENS = 1024
"""Context that has room from the start.  A longer one takes memory from the expert cache."""
ROOMY_KV_TOKENS = 8192
"""The same where all experts are on the device: they stay, unless a longer context was requested."""
FEWEST_KV_TOKENS = 256
"""A device without room for this much context is not used."""

SHORT_TOKENS = 256
"""Tokens of a prompt chunk where all weights are resident: bounds the memory of activations."""
LONG_TOKENS = 2048
"""The same where experts come over a link or from disk: each chunk brings them once."""
REPACKED_BYTES = 32 * 2**20
"""Bytes of a quantised checkpoint that are read while as many are repacked."""
PASSING_MATRICES = 4
"""That RAM holds at once on their way to a card: those that one call multiplies go together, copied to be joined."""
LARGE_TABLE_BYTES = 32 * 2**20
"""An embedding that is smaller stays in memory: its rows are not worth a disk's time."""
LARGE_LAYER_BYTES = 4 * 2**20
"""A decoder layer with less stays in memory: a disk needs longer to find it than to read it."""
LAYERS_AT_ONCE = 2
"""That are in memory of those that come from disk for each pass: one is computed while the next is read."""
KEPT_ROWS_BYTES = 16 * 2**20
"""Most bytes of rows used last that are kept of a table on disk."""
_TOKENS_PER_EXPERT = 64
"""From about this many tokens, a matrix product is bound by compute instead of reading the weights."""
_SHORTEST = 32
_SHARE = 4
"""A chunk's activations may take 1/n of what a device has left after the dense weights."""


PAGE_TOKENS = 32
"""Tokens per page of keys and values, all of one sequence."""
SPARE_WINDOW_PAGES = 2
"""Pages of a window that a sequence holds beyond what its next token sees, so that others can go on a little before."""


def pages_for(tokens: float) -> int:
    return int(-(-tokens // PAGE_TOKENS))


def window_pages(window: int, at_once: int = PAGE_TOKENS) -> int:
    """Pages, at most, that a sequence holds in layers that see so many tokens, if that many are computed at once."""
    return pages_for(window + at_once) + 2 + SPARE_WINDOW_PAGES


def round_up(value: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-value // to) * to


def record_bytes(parts: Iterable[int]) -> int:
    """Bytes of an expert's record, given those of its parts, including padding."""
    offset = 0
    for nbytes in parts:
        offset = round_up(offset + nbytes, PART_ALIGNMENT)
    return round_up(offset, RECORD_ALIGNMENT)


def pool_segment_slots(slots: int, most: int, ways: int | None) -> int:
    return ways or max(min(2, slots, most), 1, min(slots, most) // SEGMENTS)


def pool_segments(slots: int, segment_slots: int, layers: int, most: int, ways: int | None) -> int:
    """Number of segments that hold at most `slots` slots, all of them useful."""
    if ways is not None:
        return min(max(slots, 0) // ways, layers)
    return min(max(slots, 0), most + segment_slots - 1) // segment_slots


def staging_slots(budget: int, record: int, every: int, misses: str, cache_slots: int | None) -> int:
    """Slots in addition to the cache's, for experts fetched for immediate use.

    Args:
        every: number of experts that may come; more slots are useless.
    """
    if misses == "layer" or (misses == "cpu" and cache_slots == 0):
        return 0
    wanted = max(FEWEST_STAGED, min(MOST_STAGED, every, budget // (_STAGED_SHARE * record)))
    return min(wanted, budget // record)


def activation_token_bytes(hidden: int, experts_per_token: int, width: int = 2) -> int:
    """Peak bytes of a token of a chunk, by a rough count of the tensors alive at the same time.

    Residual, norms and projections are about ten of the hidden width; experts have an fp32 row for each choice.

    Args:
        width: bytes of a number.
    """
    return hidden * (10 * width + 4 * max(experts_per_token, 1))


def chunk_tokens(room: int, per_token: int, context_tokens: int) -> int:
    """The longest chunk of a prompt whose activations leave most of `room` bytes to others."""
    fitting = room // (_SHARE * max(per_token, 1))
    return max(_SHORTEST, min(LONG_TOKENS, fitting, context_tokens))


def piece_room(room: int, per_token: int, context_tokens: int) -> int:
    """Bytes reserved for the activations of such a chunk.

    Rounded up by less than a token: this way what is left to others grows with `room`; whole tokens would take from it
    at every step.
    """
    longest = max(_SHORTEST, min(LONG_TOKENS, context_tokens)) * per_token
    return max(_SHORTEST * per_token, min(longest, room // _SHARE))


def chunk_tokens_in_ram(experts: int, experts_per_token: int) -> int:
    """Tokens of a chunk whose weights are all in RAM: enough per expert to be worth reading its weights."""
    if not experts_per_token:
        return SHORT_TOKENS
    return max(SHORT_TOKENS, min(LONG_TOKENS, _TOKENS_PER_EXPERT * experts // experts_per_token))


def without_headroom(free: int) -> int:
    """Bytes of free RAM that weights may take: the rest is for activations, KV and the program."""
    return free - min(_RAM_HEADROOM_BYTES, free // 10)
