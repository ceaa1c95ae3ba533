"""Matrices that are codes already: those of quantised checkpoints, and how their scales and zeros become a record's.

A record's scale has 16 bits and its zero is in sixteenths. Codes are kept; the scale and the zero of each group are
those with the least squared error against what the checkpoint says. native/src/repack.cpp computes the same, bit by
bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.formats.weight_format import GROUP, TiledFormat

if TYPE_CHECKING:
    from engine.formats.ggml import BlockType, Bytes, Floats

_CLAMPED = 0.25
"""By how much of a step a zero may be clamped to what a record holds; beyond, its group is fitted again."""
_HIGHEST_ZERO = 255
_TINY = 2.0**-120
_FLAT = np.float32(2**20)
"""A group whose offset is this many times its scale is as good as constant."""
_NAN, _HALF_NAN = 0x7FC0, 0x7E00
_HALF_STEP = np.float32(254)
"""A scale that is off by one part in as many moves no code of int8 by half a step."""


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix [rows, columns] of codes with a scale per 32 columns: w = scale * (code - zero) or scale * table[code].

    Attributes:
        codes: uint8, or int8 where the format's are signed, [rows, columns]; columns are whole groups.
        scales: float32 [rows, columns / 32]; may be negative.
        zeros: float32 [rows, columns / 32] in units of the scale, if the format has them.
        table: the 16 values from -127 to 127 that codes stand for, if the format has one.
    """

    format: TiledFormat
    codes: NDArray[Any]
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32] | None = None
    table: tuple[int, ...] | None = None

    @property
    def groups(self) -> NDArray[Any]:
        return self.codes.reshape(len(self.codes), -1, GROUP)

    def values(self) -> NDArray[np.float32]:
        values = self.groups.astype(np.float32)
        if self.table is not None:
            values = np.array(self.table, np.float32)[self.groups]
        if self.zeros is not None:
            values -= self.zeros[..., None]
        with np.errstate(all="ignore"):  # a broken file may hold infinities
            return (values * self.scales[..., None]).reshape(self.codes.shape)


def codes_of(kind: BlockType, raw: Bytes) -> CodedMatrix | None:
    target = kind.kept_in
    if target is None:
        return None
    groups = kind.apart(raw)
    rows = len(raw)
    codes, scales, zeros = groups.codes, groups.scales, None
    if target.code_bits == 8:
        codes = codes.astype(np.int8) - np.int8(kind.zero)
    elif groups.offsets is not None:
        codes, scales, zeros = _with_zeros(codes, scales, groups.offsets)
    elif target.has_zeros:
        zeros = np.full_like(scales, kind.zero)
    by_row = None if zeros is None else zeros.reshape(rows, -1)
    return CodedMatrix(target, codes.reshape(rows, -1), scales.reshape(rows, -1), by_row, kind.table)


def _with_zeros(codes: Bytes, scales: Floats, offsets: Floats) -> tuple[Bytes, Floats, Floats]:
    """Codes [..., 32], scales and zeros of w = scale * code - offset.

    A constant group, whose scale is next to nothing, becomes 0 - 8 or 0 + 8 times an eighth of it.
    """
    with np.errstate(all="ignore"):
        flat = (scales == 0) | (np.abs(offsets) > _FLAT * np.abs(scales))
        zeros = offsets / scales
        eighths = np.abs(offsets) * np.float32(0.125)
    signs = np.where(offsets < 0, np.float32(-8), np.float32(8))
    codes = np.where(flat[..., None], np.uint8(0), codes)
    return codes, np.where(flat, eighths, scales), np.where(flat, signs, zeros)


def record_scales(matrix: CodedMatrix) -> tuple[NDArray[np.uint16], NDArray[np.uint8] | None, NDArray[np.bool_]]:
    """What a record holds beside these codes, each [rows, columns / 32].

    Returns:
        The bits of the scales in their type; zeros in sixteenths, if the format has them; false for groups that the
        format cannot hold as they are.
    """
    scales, zeros = np.ascontiguousarray(matrix.scales, np.float32), matrix.zeros
    strange = ~np.isfinite(scales)
    kept = np.ones(scales.shape, np.bool_)
    if matrix.format.scale_type == "float16":
        with np.errstate(all="ignore"):
            halves = scales.astype(np.float16)
            near = np.abs(halves.astype(np.float32) - scales) * _HALF_STEP <= np.abs(scales)
        kept = strange | (near & (matrix.groups != -128).all(-1))  # a record's codes are from -127
        return np.where(strange, _HALF_NAN, halves.view(np.uint16)).astype(np.uint16), None, kept
    if zeros is None:
        return np.where(strange, _NAN, to_bfloat16(scales)).astype(np.uint16), None, kept
    strange |= ~np.isfinite(zeros)
    kept = strange | ((zeros >= -_CLAMPED) & (zeros <= _HIGHEST_ZERO / 16 + _CLAMPED))
    with np.errstate(all="ignore"):  # in groups that are not kept, or strange
        sixteenths = zeros * np.float32(16)
        exact = (np.rint(sixteenths) == sixteenths) & (sixteenths >= 0) & (sixteenths <= _HIGHEST_ZERO)
        settled = exact | (np.abs(scales) < _TINY)
        best_scale, best_zero = _best(matrix.groups, scales, np.ascontiguousarray(zeros, np.float32))
        best_scale = np.where(settled, to_bfloat16(scales), best_scale)
        best_zero = np.where(settled, np.rint(np.clip(sixteenths, 0, _HIGHEST_ZERO)), best_zero)
        best_zero = np.where(strange | ~kept, 0, best_zero)
    return np.where(strange, _NAN, best_scale).astype(np.uint16), best_zero.astype(np.uint8), kept


def _best(
    groups: NDArray[Any], scales: NDArray[np.float32], zeros: NDArray[np.float32]
) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Of the two scales in bf16 around each, with the best zero for it, that with the least squared error."""
    whole = groups.astype(np.int32)
    total = whole.sum(-1).astype(np.float32)
    squares = np.square(whole).sum(-1).astype(np.float32)
    offset = scales * zeros
    values = scales * total - 32 * offset
    below = (scales.view(np.uint32) >> 16).astype(np.uint16)
    found: list[tuple[NDArray[np.uint16], NDArray[np.float32], NDArray[np.float32]]] = []
    for step in range(2):
        bits = below + np.uint16(step)
        scale = from_bfloat16(bits)
        zero = np.rint(np.clip((total - values / scale) * np.float32(0.5), 0, _HIGHEST_ZERO))
        a, b = scales - scale, scale * (zero * np.float32(0.0625)) - offset
        found.append((bits, zero, a * a * squares + 2 * a * b * total + 32 * (b * b)))
    (low, low_zero, low_error), (high, high_zero, high_error) = found
    better = high_error < low_error
    return np.where(better, high, low), np.where(better, high_zero, low_zero)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even, as torch rounds; of any shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact; of any shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
