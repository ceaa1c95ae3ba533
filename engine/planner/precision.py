"""How many bytes a weight takes, scales and zero points counted."""

from __future__ import annotations

from collections.abc import Mapping

BITS_PER_WEIGHT = {
    "fp32": 32.0,
    "bf16": 16.0,
    "int8": 8.5,  # blocks of 32 with a 16-bit scale
    "int4": 4.75,  # blocks of 32 with a 16-bit scale and an 8-bit zero point
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


SMALL_MODEL = 10**9
"""Weights, all experts counted: below it int4 keeps more of a model in int8."""


def careful_precision(precision: str, weights: int) -> str:
    """That of the experts' down_proj and of all dense layers, in a model of so many weights.

    Fewer weights average fewer errors out: four bits for everything cost the starter (0.13e9 weights) a fifth of its
    perplexity, four bits for gate and up alone a twentieth (`bench quality`).  A small model's bytes hardly matter.
    """
    return "int8" if precision == "int4" and weights < SMALL_MODEL else precision


def head_precision(dense: str) -> str:
    """That of a model's head on the CPU: never less than int8, its errors come through to the text at once."""
    return "int8" if dense == "int4" else dense


QUALITY_WORTH = {"bf16": 1.0, "int8": 1.15, "int4": 1.6}
"""How many times as fast as the next better precision each has to be to be taken.

int8 costs next to nothing in quality, so that bf16 has to be nearly as fast; int4 costs some.
"""


def worthwhile(speeds: Mapping[str, float]) -> str | None:
    """The precision to run in, given how fast each would be: the best quality that is not much slower than less.

    Args:
        speeds: by precision, of those that are possible.
    """
    taken: str | None = None
    for precision, worth in QUALITY_WORTH.items():
        if precision in speeds and (taken is None or speeds[precision] > worth * speeds[taken]):
            taken = precision
    return taken
