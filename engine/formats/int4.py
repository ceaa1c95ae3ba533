"""int4: integers from 0 to 15, a scale and a zero point per 32 weights of a row.  4.75 bits.

Scales and zero points are found by half-quadratic splitting (Badri and Shaji, "Half-Quadratic Quantization of Large
Machine Learning Models", 2023, which Klotski uses) with the l_1/2 norm: the shrinkage operator removes outliers, scale
and zero are fitted to the rest by least squares, alternately. It starts from several ranges, and of all candidates, as
they would be stored, the one with the least squared error is kept; min-max is the first of them, so the result is never
worse than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.formats.weight_format import TiledFormat

if TYPE_CHECKING:
    import torch

_RANGES = (1.0, 0.9, 0.8, 0.7)


class Int4(TiledFormat):
    """w = scale * (code - zero / 16), 0 <= code <= 15.  format_int4.h is the same."""

    def fit(self, groups: torch.Tensor, rounds: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        import torch

        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        best_error = torch.full_like(low, torch.inf)
        best_scale, best_zero = torch.full_like(low, torch.nan), torch.zeros_like(low)  # NaN where none was better
        for share in _RANGES if rounds else _RANGES[:1]:
            scale = share * (high - low) / 15
            zero = (-share * low / scale).where(scale > 1e-30, torch.zeros_like(scale))
            threshold = 0.1
            for _ in range(rounds // len(_RANGES) + 1):
                scale, zero = scale.bfloat16().float(), _stored_zero(zero)
                x = groups * _inverse(scale)[..., None]  # in units of the scale
                q = (x + zero[..., None]).round_().clamp_(0, 15)
                error = x - (q - zero[..., None])
                squares = error.square().sum(-1) * scale.square()
                better = squares < best_error
                best_error = squares.where(better, best_error)
                best_scale, best_zero = scale.where(better, best_scale), zero.where(better, best_zero)
                scale, zero = _refit(x, q, error, threshold, scale, zero)
                threshold *= 0.8
        q = (groups * _inverse(best_scale)[..., None] + best_zero[..., None]).round_().clamp_(0, 15)
        return q.nan_to_num_(0).to(torch.uint8), best_scale.bfloat16(), (best_zero * 16).to(torch.uint8)


def _refit(
    x: torch.Tensor, q: torch.Tensor, error: torch.Tensor, threshold: float, scale: torch.Tensor, zero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least squares over the weights except outliers; `threshold` is 1 / beta in units of the scale."""
    import torch

    size = error.abs()
    kept = (size - threshold / (size + 1e-12).sqrt()).clamp_(min=0)
    target = x - torch.copysign(kept, error)
    n, q_sum, t_sum = x.shape[-1], q.sum(-1), target.sum(-1)
    spread = n * q.square().sum(-1) - q_sum.square()
    slope = (n * (q * target).sum(-1) - q_sum * t_sum) / spread.where(spread > 0, torch.ones_like(spread))
    usable = (spread > 0) & (slope > 0.25) & (slope < 4)
    return (slope * scale).where(usable, scale), ((q_sum - t_sum / slope) / n).where(usable, zero)


def _stored_zero(zero: torch.Tensor) -> torch.Tensor:
    return (zero * 16).round().clamp(0, 255) / 16


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return scale.reciprocal().where(scale > 1e-30, scale.new_zeros(()))


INT4 = Int4(
    name="int4",
    words="4-bit",
    bits=4.75,
    worth=1.6,
    native=2,
    on_card=True,
    small_models="int8",
    head="int8",
    code_bits=4,
    has_zeros=True,
)
