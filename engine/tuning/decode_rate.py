"""A timing of real tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Decoding at batch 1.

    Attributes:
        tokens_per_s: after the first token; 0 if fewer than two.
        ttft_s: time to first token.
        tokens: tokens timed.
    """

    tokens_per_s: float
    ttft_s: float
    tokens: int
