"""A timing of real tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Decoding at batch 1.

    Attributes:
        tokens_per_s: after the first token; 0 if there were not two.
        ttft_s: until the first token.
        tokens: that were timed.
    """

    tokens_per_s: float
    ttft_s: float
    tokens: int
