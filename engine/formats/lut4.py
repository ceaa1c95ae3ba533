"""lut4: codes into a table of 16 values, a scale per 32 weights of a row.  4.5 bits.

MXFP4 and IQ4_NL are this format with tables of their own, so their codes are kept unchanged. New weights are fitted to
IQ4_NL's table, whose values are denser where weights are frequent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.formats.weight_format import TiledFormat

if TYPE_CHECKING:
    import torch

IQ4_NL_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The table of llama.cpp's IQ4_NL (ggml-common.h, `kvalues_iq4nl`)."""
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of E2M1 (OCP Microscaling Formats, version 1.0, section 5.3.3)."""

_SHARES = tuple(1.1 - 0.05 * step for step in range(8))
"""Tried for each group: the table position of its largest weight."""


class Lut4(TiledFormat):
    """w = scale * table[code].  format_lut4.h is the same."""

    def fit(
        self,
        groups: torch.Tensor,
        rounds: int,  # noqa: ARG002 (there is nothing to optimise)
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `TiledFormat.fit`.

        Tries scales around those that map the largest weight to either end of the table, each refitted once by least
        squares, and keeps the one with the least squared error, as it would be stored.
        """
        import torch

        assert self.table is not None
        values = torch.tensor(self.table, dtype=torch.float32, device=groups.device)
        top = groups.abs().amax(-1)
        found, least = torch.zeros_like(top), torch.full_like(top, torch.inf)
        for end in (values.abs().max(), -values.abs().max()):
            for share in _SHARES:
                scale = (share * top / end).bfloat16().float()
                for _ in range(2):
                    nearest = values[_nearest(groups, scale, values)]
                    error = (groups - scale[..., None] * nearest).square().sum(-1)
                    better = error < least
                    found, least = scale.where(better, found), error.where(better, least)
                    squares = nearest.square().sum(-1)
                    refitted = (groups * nearest).sum(-1) / squares.where(squares > 0, torch.ones_like(squares))
                    scale = refitted.where(squares > 0, scale).bfloat16().float()
        found = found.masked_fill((top < 1e-30) | ~top.isfinite(), 0)
        codes = _nearest(groups.nan_to_num(0, 0, 0), found, values)
        return codes.to(torch.uint8), found.masked_fill(~top.isfinite(), torch.nan).bfloat16(), None


def _nearest(groups: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Codes [..., 32] of the values nearest to the scaled `groups` [..., 32]; the first of equals."""
    distances = (groups[..., None] - scale[..., None, None] * values).abs_()
    return distances.argmin(-1)


LUT4 = Lut4(
    name="lut4",
    words="4-bit, by table",
    bits=4.5,
    native=3,
    on_card=True,
    small_models="int8",
    head="int8",
    code_bits=4,
    table=IQ4_NL_TABLE,
)
