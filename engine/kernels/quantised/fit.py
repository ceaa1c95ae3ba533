"""Scales, zero points and whole numbers for weights, in torch: for any device, and where no native kernel does it.

int4 is found by half-quadratic splitting (Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning
Models", 2023, which Klotski uses) with the l_1/2 norm: what the shrinkage operator takes for outliers is set aside,
scale and zero are fitted to the rest by least squares, in turns.  It starts from several ranges, and of all that is
tried, stored as it would be, the one with the least squared error is kept; min-max is the first of them, so it is never
worse.  fit_group.h is the same algorithm.
"""

from __future__ import annotations

import torch

from engine.kernels.quantised.tiles import TiledMatrix, TiledShape, pack, to_blocks

ROUNDS = 16
"""Of the optimisation, over all starts together."""

_SCALES = 16
"""Tried for int8: neighbours in bf16."""
_RANGES = (1.0, 0.9, 0.8, 0.7)
_PIECE = 1 << 22
"""Weights quantised at once: bounds the memory for intermediate results."""


def quantise_in_torch(weight: torch.Tensor, target: TiledMatrix, rounds: int = ROUNDS) -> None:
    """Fills `target` from `weight` [rows, columns], of any floating type; with no rounds int4 is plain min-max."""
    shape = target.shape
    blocks = to_blocks(weight.detach(), shape)
    step = max(1, _PIECE // max(1, blocks[0].numel()))
    for begin in range(0, shape.blocks, step):
        piece = slice(begin, begin + step)
        of_piece = TiledMatrix(
            TiledShape(blocks[piece].shape[0] * 32, shape.columns, shape.precision),
            target.weights[piece],
            target.scales[piece],
            target.zeros[piece] if target.zeros is not None else None,
        )
        if shape.precision == "int8":
            pack(*fit_int8(blocks[piece]), None, of_piece)
        else:
            pack(*fit_int4(blocks[piece], rounds), of_piece)


def fit_int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., 32] -> int8 of the same shape, bf16 scales [...], NaN for a group with an infinity or a NaN.

    Of the scales from the least one that clips nothing upwards, that with the least squared error: some of them happen
    to meet a group's values much better than others.
    """
    top = groups.abs().amax(-1)
    first = _bf16_above(top / 127)
    scales, least = first, torch.full_like(top, torch.inf)
    for step in range(_SCALES):
        scale = (first.view(torch.int16) + step).view(torch.bfloat16)
        x = groups * scale.float().reciprocal()[..., None]
        x -= x.round().clamp_(-127, 127)
        squares = x.square_().sum(-1) * scale.float().square()
        better = squares < least
        scales, least = scale.where(better, scales), squares.where(better, least)
    scales = scales.masked_fill(top < 1e-30, 0).masked_fill(~top.isfinite(), torch.nan)
    inverse = scales.float().reciprocal().where(scales > 0, torch.zeros_like(top))
    q = (groups * inverse[..., None]).round_().clamp_(-127, 127)
    return q.nan_to_num_(0).to(torch.int8), scales


def fit_int4(groups: torch.Tensor, rounds: int = ROUNDS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 [..., 32] -> uint8 below 16 of the same shape, bf16 scales [...], uint8 zeros [...] in sixteenths.

    As `fit_int8`, the scale is NaN where a weight is not finite.
    """
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    best_error = torch.full_like(low, torch.inf)
    best_scale, best_zero = torch.full_like(low, torch.nan), torch.zeros_like(low)  # NaN where nothing is better
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
    """Least squares over the weights without their outliers; `threshold` is 1 / beta in units of the scale."""
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
    return scale.reciprocal().where(scale > 1e-30, torch.zeros_like(scale))


def _bf16_above(value: torch.Tensor) -> torch.Tensor:
    """The least bf16 that is not smaller: a scale rounded down would clip the largest weight."""
    nearest = value.bfloat16()
    above = (nearest.view(torch.int16) + 1).view(torch.bfloat16)
    return above.where(nearest.float() < value, nearest)
