"""int8: integers from -127 to 127, a scale in fp16 per 32 weights of a row.  8.5 bits.

Steps are so small that a scale in bf16 would show. GGUF's Q8_0 has the same codes and scales, and so the same range:
where the largest of 32 weights is below 1e-3, scales are fp16's subnormal numbers, 6e-8 apart; weights above 8e6 are
clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.formats.weight_format import TiledFormat

if TYPE_CHECKING:
    import torch

_LARGEST = 65504.0
"""In fp16."""
_SUBNORMAL = 0x400
"""Bits of fp16's smallest normal number."""
_STEP = 8
"""Between scales that are tried, in units of fp16's last place: 1/256 to 1/128 of them."""


class Int8(TiledFormat):
    """w = scale * code, -127 <= code <= 127.  format_int8.h is the same."""

    def fit(self, groups: torch.Tensor, rounds: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `TiledFormat.fit`.

        Tries `rounds` scales from the smallest that clips nothing upwards, and keeps the one with the least squared
        error: some fit a group's values much better than others.
        """
        import torch

        top = groups.abs().amax(-1)
        first = _half_above((top / 127).clamp(max=_LARGEST)).view(torch.int16)
        apart = torch.where(first < _SUBNORMAL, 1, _STEP).to(torch.int16)
        scales, least = first.view(torch.float16).float(), torch.full_like(top, torch.inf)
        for step in range(max(1, rounds)):
            scale = (first + step * apart).view(torch.float16).float().clamp(max=_LARGEST)
            x = groups * scale.reciprocal()[..., None]
            x -= x.round().clamp_(-127, 127)
            squares = x.square_().sum(-1) * scale.square()
            better = squares < least
            scales, least = scale.where(better, scales), squares.where(better, least)
        q = (groups * scales.reciprocal()[..., None]).round_().clamp_(-127, 127).nan_to_num_(0)
        scales = scales.half().masked_fill(top < 1e-30, 0).masked_fill(~top.isfinite(), torch.nan)
        return q.to(torch.int8), scales, None


def _half_above(value: torch.Tensor) -> torch.Tensor:
    """The smallest fp16 above 0 that is not below `value`: a scale rounded down would clip the largest weight."""
    import torch

    nearest = value.half()
    above = (nearest.view(torch.int16) + 1).view(torch.float16)
    return above.where((nearest.float() < value) | (nearest == 0), nearest)


INT8 = Int8(
    name="int8",
    words="8-bit",
    bits=8.5,
    worth=1.15,
    native=1,
    on_card=True,
    code_bits=8,
    scale_type="float16",
)
