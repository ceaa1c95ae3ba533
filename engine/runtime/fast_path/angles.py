"""Rotary angles as the kernels read them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Angles(NamedTuple):
    """Cosines and sines of some tokens.

    Attributes:
        arguments: where the first ones are, how many floats lie between those of a token, and between tokens.
        held: what they lie in.
    """

    arguments: tuple[int, int, int, int]
    held: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """Those of [1, q, angles] each."""
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        return cls((cos.data_ptr(), sin.data_ptr(), 1, cos.shape[-1]), (cos, sin))

    @classmethod
    def of_complex(cls, turns: torch.Tensor) -> Angles:
        """Those of numbers [1, q, angles] on the unit circle."""
        turns = turns.contiguous()
        start = turns.data_ptr()
        return cls((start, start + 4, 2, 2 * turns.shape[-1]), (turns,))
