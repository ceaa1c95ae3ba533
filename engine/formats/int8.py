"""int8: integers from -127 to 127, a scale per 32 weights of a row.  8.5 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.formats.weight_format import TiledFormat

if TYPE_CHECKING:
    import torch


class Int8(TiledFormat):
    """w = scale * code, -127 <= code <= 127.  format_int8.h is the same."""

    def fit(self, groups: torch.Tensor, rounds: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `TiledFormat.fit`.

        Tries `rounds` scales, adjacent in bf16, from the smallest that clips nothing upwards, and keeps the one with
        the least squared error: some fit a group's values much better than others.
        """
        import torch

        top = groups.abs().amax(-1)
        first = _bf16_above(top / 127)
        scales, least = first, torch.full_like(top, torch.inf)
        for step in range(max(1, rounds)):
            scale = (first.view(torch.int16) + step).view(torch.bfloat16)
            x = groups * scale.float().reciprocal()[..., None]
            x -= x.round().clamp_(-127, 127)
            squares = x.square_().sum(-1) * scale.float().square()
            better = squares < least
            scales, least = scale.where(better, scales), squares.where(better, least)
        scales = scales.masked_fill(top < 1e-30, 0).masked_fill(~top.isfinite(), torch.nan)
        inverse = scales.float().reciprocal().where(scales > 0, torch.zeros_like(top))
        q = (groups * inverse[..., None]).round_().clamp_(-127, 127)
        return q.nan_to_num_(0).to(torch.int8), scales, None


def _bf16_above(value: torch.Tensor) -> torch.Tensor:
    """The smallest bf16 not below `value`: a scale rounded down would clip the largest weight."""
    import torch

    nearest = value.bfloat16()
    above = (nearest.view(torch.int16) + 1).view(torch.bfloat16)
    return above.where(nearest.float() < value, nearest)


INT8 = Int8(
    name="int8",
    words="8-bit",
    bits=8.5,
    worth=1.15,
    native=1,
    on_card=True,
    code_bits=8,
)
