"""Request batching by balance of tokens (MoE-Lightning, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(
    lengths: Sequence[int],
    micro_batches: int,
    *,
    most_rows: int,
    growth: int = 0,
    most_tokens: int | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Deals rows out to micro-batches, the longest first, each to the one with the fewest tokens.

    Args:
        lengths: tokens of each row.
        micro_batches: n, how many to make.
        most_rows: ubs, rows of one at most.
        growth: gen_len, tokens that each row will have besides.
        most_tokens: cache_size, tokens of one micro-batch at most, growth included; `None` is no limit.

    Returns:
        The rows of each micro-batch that has any, in the order of their indices, and the rows left for the next batch.
    """
    open_ones: list[tuple[list[int], int]] = [([], 0) for _ in range(micro_batches)]
    closed: list[list[int]] = []
    left: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not open_ones:
            left.append(row)
            continue
        place = min(range(len(open_ones)), key=lambda place: open_ones[place][1])
        rows, tokens = open_ones[place]
        if most_tokens is not None and tokens + lengths[row] + (1 + len(rows)) * growth > most_tokens:
            left.append(row)
            continue
        rows.append(row)
        open_ones[place] = (rows, tokens + lengths[row])
        if len(rows) == most_rows:
            closed.append(rows)
            del open_ones[place]
    filled = [*closed, *(rows for rows, _ in open_ones if rows)]
    return [sorted(rows) for rows in filled], sorted(left)
