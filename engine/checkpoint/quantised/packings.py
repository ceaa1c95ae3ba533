"""How the tensors of quantised safetensors checkpoints make weights, row by row.

A word of 32 bits holds 32 / bits codes, the first in the lowest bits. With codes c [rows, columns] and, for each group
of columns, a scale s and a zero z: w = s * (c - z). Sources:
- GPTQ: https://github.com/ModelCloud/GPTQModel (`nn_modules/qlinear`), AWQ: https://github.com/casper-hansen/AutoAWQ
  (`modules/linear/gemm.py`), compressed-tensors: https://github.com/vllm-project/compressed-tensors (`compressors`),
  NVFP4: the same and https://github.com/NVIDIA/Model-Optimizer, MLX: `mlx.core.quantize`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import Array, Floats, Packing, numbers
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import quoted
from engine.formats.coded import CodedMatrix
from engine.formats.int4 import INT4
from engine.formats.int8 import INT8
from engine.formats.weight_format import GROUP, TiledFormat

_AT_ONCE = 2**22
"""Weights that are unpacked at once."""
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in its word each of 8 neighbouring columns is: they are stored in the order 0, 2, 4, 6, 1, 3, 5, 7."""
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Arrangement(IntEnum):
    """How codes lie in the words that hold them; `SwitchyardCodes` of the native kernels has the same numbers."""

    APART = 0
    """[rows, columns], each by itself."""
    ROWS = 1
    """[rows, columns * bits / 32], the first code of a word in its lowest bits."""
    COLUMNS = 2
    """[columns * bits / 32, rows], so too."""
    AWQ = 3
    """[columns, rows / 8] of 4 bits; a word has rows 0, 2, 4, 6, 1, 3, 5, 7 of eight, the first in the lowest bits."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Some rows of a quantised matrix.

    Attributes:
        words: that hold its codes, or these themselves.
        arrangement: of the codes in the words.
        bits: of a code.
        columns: of the matrix.
        scales: [rows, groups].
        zeros: [rows, groups] in units of the scale; `None`: 0.
        added: [rows, groups], added in the end; `None`: 0.
        group_of: for each column its group; `None`: groups are equally many neighbouring columns.
    """

    words: Array
    arrangement: Arrangement
    bits: int
    columns: int
    scales: Floats
    zeros: Floats | None = None
    added: Floats | None = None
    group_of: NDArray[np.intp] | None = None

    @property
    def codes(self) -> Array:
        if self.arrangement is Arrangement.APART:
            return self.words
        if self.arrangement is Arrangement.AWQ:
            return np.ascontiguousarray(_awq_fields(self.words).T)
        rows = self.words if self.arrangement is Arrangement.ROWS else self.words.T
        return fields(rows, self.bits)[:, : self.columns]

    @property
    def rows(self) -> int:
        return len(self.scales)

    @property
    def group(self) -> int:
        """Neighbouring columns that have a scale; 0 if groups are not of such."""
        columns, groups = self.columns, self.scales.shape[1]
        return columns // groups if self.group_of is None and columns % groups == 0 else 0

    @property
    def kept_in(self) -> TiledFormat | None:
        """The format of a record that keeps these very codes: of four bits or fewer, or of eight around 128 or 0."""
        if not self.group or self.group % GROUP:
            return None
        if self.arrangement is Arrangement.APART:
            return INT8 if self.words.dtype == np.int8 and self.zeros is None and self.added is None else None
        if self.bits < 8:
            return INT4 if self.zeros is not None or self.added is not None else None
        return INT8 if self.zeros is not None and self.added is None and bool(np.all(self.zeros == 128)) else None

    def coded(self) -> CodedMatrix | None:
        if self.kept_in is None:
            return None
        codes, of_groups, zeros = self.codes, self.scales, self.zeros
        if self.added is not None:
            codes, of_groups, zeros = _with_zeros(codes, of_groups, self.added)
        scales = np.repeat(of_groups, self.group // GROUP, axis=1)
        if self.kept_in is INT8:
            codes = codes if codes.dtype == np.int8 else (codes ^ np.uint8(128)).view(np.int8)
            return CodedMatrix(INT8, codes, scales)
        assert zeros is not None
        return CodedMatrix(INT4, codes, scales, np.repeat(zeros, self.group // GROUP, axis=1))

    def values(self) -> Floats:
        rows, columns = self.rows, self.columns

        def spread(of_groups: Floats) -> Floats:
            return of_groups[..., None] if self.group_of is None else of_groups[:, self.group_of]

        shape = (rows, self.scales.shape[1], -1) if self.group_of is None else (rows, columns)
        values = self.codes.astype(np.float32).reshape(shape)
        with np.errstate(all="ignore"):  # a broken file may hold anything
            if self.zeros is not None:
                values -= spread(self.zeros)
            values *= spread(self.scales)
            if self.added is not None:
                values += spread(self.added)
        return values.reshape(rows, columns)


class ByRows(Packing):
    """A packing whose rows can be unpacked some at a time, so that the whole is never in memory in float32.

    Attributes:
        words: what such weights are called.
    """

    words: ClassVar[str]

    @abstractmethod
    def codes_of(self, entries: Sequence[TensorEntry], arrays: Sequence[Array], rows: slice) -> Codes:
        """The codes of some rows of the result, whose first is a multiple of 32."""

    @abstractmethod
    def shape(self, arrays: Sequence[Array]) -> tuple[int, int]:
        """Rows and columns of the result."""

    def kept_in(self, entries: Sequence[TensorEntry], columns: int) -> TiledFormat | None:
        """The format of a record that keeps these codes, as far as the tensors' shapes tell."""
        del entries, columns
        return None

    def pieces(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> Iterator[Floats]:
        rows, columns = self.shape(arrays)
        step = max(_AT_ONCE // max(columns, 1) // 32, 1) * 32
        for begin in range(0, rows, step):
            yield self.codes_of(entries, arrays, slice(begin, min(begin + step, rows))).values()

    def unpack(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> Floats:
        return np.concatenate(list(self.pieces(entries, arrays)))

    def codes(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> CodedMatrix | None:
        rows, _ = self.shape(arrays)
        return self.codes_of(entries, arrays, slice(0, rows)).coded()


def _with_zeros(codes: Array, scales: Floats, added: Floats) -> tuple[Array, Floats, Floats]:
    """Codes, scales and zeros of w = scale * code + added.

    A constant group, whose scale is 0, becomes 8 or -8 times an eighth of it.
    """
    flat = scales == 0
    with np.errstate(all="ignore"):
        zeros = np.where(flat, np.where(added > 0, 0, 8), -added / scales).astype(np.float32)
    instead = np.where(added > 0, 8, 0).astype(codes.dtype)[..., None]
    by_group = np.where(flat[..., None], instead, codes.reshape(*scales.shape, -1))
    return by_group.reshape(codes.shape), np.where(flat, np.abs(added) / 8, scales).astype(np.float32), zeros


def _kept(bits: int, columns: int, groups: int) -> TiledFormat | None:
    """The format for codes of so many bits in so many groups of neighbouring columns."""
    if columns % groups or columns // groups % GROUP:
        return None
    return INT4 if bits <= 4 else INT8


def fields(words: Array, bits: int) -> NDArray[np.uint8]:
    """The codes in words of 32 bits: [..., n] -> [..., n * 32 / bits]."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((raw[..., None] >> shifts) & np.uint8(2**bits - 1)).reshape(*raw.shape[:-1], -1)


def _awq_fields(words: Array) -> NDArray[np.uint8]:
    return fields(words, 4).reshape(len(words), -1, 8)[..., _AWQ_ORDER].reshape(len(words), -1)


def _group_of(entry: TensorEntry, index: Array, groups: int) -> NDArray[np.intp] | None:
    """A column's group by `g_idx`; `None` if groups are of neighbouring columns, all of the same size."""
    if len(index) and (index.min() < 0 or index.max() >= groups):
        raise damaged(entry, f"names a group beyond the {groups} that there are")
    if len(index) % groups == 0 and np.array_equal(index, np.arange(len(index)) // (len(index) // groups)):
        return None
    return index.astype(np.intp)


@dataclass(frozen=True, slots=True)
class Gptq(ByRows):
    """qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], and g_idx [in] if there.

    Attributes:
        lowered: whether zeros are stored less one: the first version of the format does so, on whole words.
        regular: whether groups are said to be of neighbouring columns, and codes of 8 bits to be around 128.
    """

    words: ClassVar[str] = "GPTQ"
    bits: int
    lowered: bool
    regular: bool = True

    def kept_in(self, entries: Sequence[TensorEntry], columns: int) -> TiledFormat | None:
        return _kept(self.bits, columns, entries[2].shape[0]) if self.regular else None

    def shape(self, arrays: Sequence[Array]) -> tuple[int, int]:
        return arrays[0].shape[1], arrays[0].shape[0] * 32 // self.bits

    def codes_of(self, entries: Sequence[TensorEntry], arrays: Sequence[Array], rows: slice) -> Codes:
        scales = numbers(entries[2].dtype, arrays[2][:, rows]).T
        words = slice(rows.start * self.bits // 32, rows.stop * self.bits // 32)
        zeros = arrays[1].view(np.uint32)[:, words]
        if self.lowered:
            zeros = zeros + np.uint32(0xFFFFFFFF // (2**self.bits - 1))
        group_of = _group_of(entries[3], arrays[3], scales.shape[1]) if len(arrays) > 3 else None
        columns, unpacked = len(arrays[0]) * 32 // self.bits, fields(zeros, self.bits).T.astype(np.float32)
        return Codes(arrays[0][:, rows], Arrangement.COLUMNS, self.bits, columns, scales, unpacked, group_of=group_of)


@dataclass(frozen=True, slots=True)
class Awq(ByRows):
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out], all with four bits."""

    words: ClassVar[str] = "AWQ"

    def kept_in(self, entries: Sequence[TensorEntry], columns: int) -> TiledFormat | None:
        return _kept(4, columns, entries[2].shape[0])

    def shape(self, arrays: Sequence[Array]) -> tuple[int, int]:
        return arrays[0].shape[1] * 8, arrays[0].shape[0]

    def codes_of(self, entries: Sequence[TensorEntry], arrays: Sequence[Array], rows: slice) -> Codes:
        codes, packed = (array[:, rows.start // 8 : rows.stop // 8] for array in arrays[:2])
        scales = numbers(entries[2].dtype, arrays[2][:, rows]).T
        zeros = _awq_fields(packed).T.astype(np.float32)
        return Codes(codes, Arrangement.AWQ, 4, len(codes), scales, zeros)


@dataclass(frozen=True, slots=True)
class PackedIntegers(ByRows):
    """compressed-tensors' pack-quantized.

    weight_packed [out, in * bits / 32], weight_scale [out, groups] or one in all, weight_shape [2], and, if there,
    weight_zero_point, packed [out * bits / 32, groups] or signed [out, groups], and weight_g_idx [in].
    """

    words: ClassVar[str] = "packed integers"
    bits: int
    columns: int
    has_zeros: bool

    def kept_in(self, entries: Sequence[TensorEntry], columns: int) -> TiledFormat | None:
        if len(entries) > 3 + self.has_zeros or (self.bits == 8 and self.has_zeros):
            return None
        return _kept(self.bits, columns, max(entries[1].numel // entries[0].shape[0], 1))

    def shape(self, arrays: Sequence[Array]) -> tuple[int, int]:
        return len(arrays[0]), self.columns

    def codes_of(self, entries: Sequence[TensorEntry], arrays: Sequence[Array], rows: slice) -> Codes:
        said = tuple(arrays[2].reshape(-1).tolist())
        if said != self.shape(arrays):
            raise damaged(entries[2], f"says {said} of a matrix that is {self.shape(arrays)}")
        scales = _scales(entries[1], arrays[1], rows)
        half = 2 ** (self.bits - 1)
        zeros: Floats = np.full_like(scales, half)
        if self.has_zeros and entries[3].dtype == "I8":
            zeros = arrays[3].reshape(len(arrays[0]), -1)[rows].astype(np.float32) + half
        elif self.has_zeros:
            words = slice(rows.start * self.bits // 32, -(-rows.stop * self.bits // 32))
            packed = fields(arrays[3][words].T, self.bits)[:, : rows.stop - rows.start]
            zeros = packed.T.astype(np.float32)
        at = 3 + self.has_zeros
        group_of = None
        if len(arrays) > at and not np.all(arrays[at] == -1):  # never filled in: there is no order
            group_of = _group_of(entries[at], arrays[at], scales.shape[1])
        return Codes(arrays[0][rows], Arrangement.ROWS, self.bits, self.columns, scales, zeros, group_of=group_of)


@dataclass(frozen=True, slots=True)
class Scaled(ByRows):
    """Numbers of 8 bits, weight [out, in], with weight_scale: one in all, [out, groups], or one per block.

    And weight_zero_point like weight_scale, if there.

    Attributes:
        block: rows and columns that share a scale, if several rows do.
    """

    words: ClassVar[str] = "int8"
    block: tuple[int, int] | None = None

    def kept_in(self, entries: Sequence[TensorEntry], columns: int) -> TiledFormat | None:
        if self.block is not None or len(entries) > 2 or entries[0].dtype != "I8":
            return None
        return _kept(8, columns, max(entries[1].numel // entries[0].shape[0], 1))

    def shape(self, arrays: Sequence[Array]) -> tuple[int, int]:
        return arrays[0].shape

    def codes_of(self, entries: Sequence[TensorEntry], arrays: Sequence[Array], rows: slice) -> Codes:
        codes = arrays[0][rows]
        if entries[0].dtype != "I8":
            codes = numbers(entries[0].dtype, codes)
        apart = (codes, Arrangement.APART, 8, codes.shape[1])
        more = zip(entries[1:], arrays[1:], strict=True)
        if self.block is None:
            scales, *zeros = (_scales(entry, array, rows) for entry, array in more)
            return Codes(*apart, scales, zeros[0] if zeros else None)
        of_row = np.arange(rows.start, rows.stop) // self.block[0]
        of_column = np.arange(codes.shape[1]) // self.block[1]
        scales, *zeros = (numbers(entry.dtype, array)[of_row] for entry, array in more)
        return Codes(*apart, scales, zeros[0] if zeros else None, group_of=of_column)


@dataclass(frozen=True, slots=True)
class Nvfp4(ByRows):
    """Two E2M1 numbers a byte, the first in the low half: [out, in / 2]; a scale for 16, [out, in / 16]; one in all.

    Attributes:
        divides: whether the scale in all divides, as in compressed-tensors, or multiplies, as in ModelOpt.
    """

    words: ClassVar[str] = "NVFP4"
    divides: bool

    def shape(self, arrays: Sequence[Array]) -> tuple[int, int]:
        return arrays[0].shape[0], arrays[0].shape[1] * 2

    def codes_of(self, entries: Sequence[TensorEntry], arrays: Sequence[Array], rows: slice) -> Codes:
        codes = _E2M1[fields(arrays[0][rows], 4)]
        scales, whole = numbers(entries[1].dtype, arrays[1][rows]), numbers(entries[2].dtype, arrays[2]).reshape(-1)[0]
        with np.errstate(all="ignore"):
            scales = scales / whole if self.divides else scales * whole
        return Codes(codes, Arrangement.APART, 4, codes.shape[1], scales)


@dataclass(frozen=True, slots=True)
class Affine(ByRows):
    """MLX: weight [out, in * bits / 32], scales and biases [out, groups]; w = scale * code + bias."""

    words: ClassVar[str] = "MLX"
    bits: int

    def kept_in(self, entries: Sequence[TensorEntry], columns: int) -> TiledFormat | None:
        return _kept(self.bits, columns, entries[1].shape[-1]) if self.bits <= 4 else None

    def shape(self, arrays: Sequence[Array]) -> tuple[int, int]:
        return len(arrays[0]), arrays[0].shape[1] * 32 // self.bits

    def codes_of(self, entries: Sequence[TensorEntry], arrays: Sequence[Array], rows: slice) -> Codes:
        scales, biases = (numbers(entries[at].dtype, arrays[at][rows]) for at in (1, 2))
        columns = arrays[0].shape[1] * 32 // self.bits
        return Codes(arrays[0][rows], Arrangement.ROWS, self.bits, columns, scales, added=biases)


def _scales(entry: TensorEntry, array: Array, rows: slice) -> Floats:
    found = numbers(entry.dtype, array)
    if found.size == 1:
        return np.full((rows.stop - rows.start, 1), found.reshape(-1)[0])
    return found.reshape(len(found), -1)[rows]


def damaged(entry: TensorEntry, what: str) -> EngineError:
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED, f"{quoted(entry.key)} in {entry.file} {what}: download or copy the model again."
    )
