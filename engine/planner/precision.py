"""How many bytes a weight takes, scales and zero points counted."""

from __future__ import annotations

BITS_PER_WEIGHT = {
    "bf16": 16.0,
    "int8": 8.5,  # blocks of 32 with a 16-bit scale
    "int4": 4.5,  # blocks of 32 with a 16-bit scale
    "awq4": 4.0 + 20 / 128,  # groups of 128 with a 16-bit scale and a 4-bit zero point
    "hqq4": 4.0 + 16 / 64 + 16 / 128,  # groups of 64 with 8-bit scale and zero point, themselves in groups of 128
}
"""Bits of one weight in each format."""


def bytes_per_weight(precision: str) -> float:
    """Bytes of one weight.

    Raises:
        KeyError: no such precision.
    """
    return BITS_PER_WEIGHT[precision] / 8
