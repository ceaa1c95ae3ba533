"""Matrices, blocks of GGUF files and codes of quantised safetensors to tiles and back: natively where possible."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.checkpoint.quantised.packings import Arrangement, Codes
from engine.formats import TiledFormat
from engine.formats.coded import CodedMatrix, codes_of
from engine.formats.ggml import BlockType
from engine.formats.tiles import (
    ROUNDS,
    Pairing,
    RecordCodes,
    RecordLayout,
    TiledMatrix,
    TiledShape,
    dequantise,
    fit_codes,
    joined,
    keep_codes,
    quantise_in_torch,
    store_codes,
)
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.structs import (
    IN_BLOCKS,
    BlocksStruct,
    CodesStruct,
    MatrixStruct,
    RepackStruct,
    matrix_struct,
)

_FEW_ROUNDS = 8
"""Of fits: half of what full precision is worth, for values that have been rounded once already."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a GGUF file, in RAM or on a card.

    Attributes:
        raw: uint8 [stored rows, bytes of a row], contiguous.
        order: int64 [rows]: which stored rows are meant, one after the other; `None`: all as they are.
    """

    kind: BlockType
    raw: torch.Tensor
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        raw, order = self.raw, self.order
        if raw.dtype != torch.uint8 or raw.dim() != 2 or not raw.is_contiguous() or raw.shape[1] % self.kind.nbytes:
            raise ValueError(f"no rows of {self.kind.name} blocks: {raw.dtype} {tuple(raw.shape)}")
        if order is not None:
            if order.dtype != torch.int64 or order.dim() != 1 or not order.is_contiguous():
                raise ValueError("an order of rows is int64 [rows]")
            if len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(raw):
                raise ValueError("an order of rows beyond them")

    @property
    def rows(self) -> int:
        """How many rows are meant."""
        return len(self.raw) if self.order is None else len(self.order)

    @property
    def columns(self) -> int:
        """Weights of a row."""
        return self.raw.shape[1] // self.kind.nbytes * self.kind.elements

    @property
    def in_order(self) -> torch.Tensor:
        """The rows that are meant, uint8 [rows, bytes of a row]."""
        return self.raw if self.order is None else self.raw[self.order]

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        return {"": self.raw}

    @property
    def matrix_struct(self) -> MatrixStruct:
        """`SwitchyardMatrix`, which points into this."""
        order = None if self.order is None else self.order.data_ptr()
        shape = (self.rows, self.columns)
        return MatrixStruct(self.raw.data_ptr(), None, None, None, *shape, IN_BLOCKS, 0, None, order, self.kind.id, -1)

    @property
    def struct(self) -> BlocksStruct:
        """`SwitchyardBlocks`, which points into this."""
        order = None if self.order is None else self.order.data_ptr()
        return BlocksStruct(self.raw.data_ptr(), order, self.kind.id)


Source = Blocks | Codes


def repack(matrices: Sequence[tuple[Sequence[Source], TiledMatrix]], kernels: NativeKernels | None) -> None:
    """Fills the targets, in RAM, each from its sources: of all its rows, or first of gate and then of up rows.

    Codes are kept where the target's format keeps those of the source; everything else is fitted from the exact
    values, but that codes whose target cannot keep them are rounded to bf16 before.
    """
    native = []
    for sources, target in matrices:
        _check(sources, target)
        set_table(sources, target)
        if kernels is None:
            _repack_in_torch(sources, target)
        elif any(isinstance(each, Codes) and not _keeps(each, target) for each in sources):
            values = [torch.from_numpy(_values(each)).bfloat16() for each in sources]
            quantise_natively(joined(values, target.shape.pairing).contiguous(), target, kernels, _FEW_ROUNDS)
        else:
            native.append((sources, target))
    if kernels is not None and native:
        _repack_natively(native, kernels)


def _repack_natively(matrices: Sequence[tuple[Sequence[Source], TiledMatrix]], kernels: NativeKernels) -> None:
    calls = (RepackStruct * len(matrices))()
    held: list[object] = []  # what the structs point to
    for call, (sources, target) in zip(calls, matrices, strict=True):
        structs = [each.struct if isinstance(each, Blocks) else _codes_struct(each, held) for each in sources]
        call.target, call.first = matrix_struct(target), structs[0]
        call.second = structs[1] if len(structs) > 1 else BlocksStruct()
    if kernels.repack(kernels.pool, calls, len(matrices), _FEW_ROUNDS):
        raise ValueError("blocks of an unknown type, or codes that are not kept")


def _codes_struct(source: Codes, held: list[object]) -> BlocksStruct:
    """`SwitchyardBlocks` of codes, which points into what is added to `held`."""
    words, rows = np.ascontiguousarray(source.words), source.rows
    is_signed = source.arrangement is Arrangement.APART
    arrangement = Arrangement.ROWS if is_signed else source.arrangement
    if words.nbytes * 8 < rows * source.columns * source.bits:
        raise ValueError(f"{words.shape} words for {rows} x {source.columns} codes")
    stride = words.nbytes // 4 // rows if arrangement is Arrangement.ROWS else words.shape[1]
    with_zeros = (source.zeros, source.added) if source.bits < 8 else (None, None)
    floats = [None if each is None else np.ascontiguousarray(each, np.float32) for each in (source.scales, *with_zeros)]
    codes = CodesStruct(
        words.ctypes.data,
        *(None if each is None else each.ctypes.data for each in floats),
        *(stride, source.group, arrangement, source.bits, not is_signed),
    )
    held += [words, floats, codes]
    return BlocksStruct(None, None, -1, ctypes.addressof(codes))


def unpack_into(source: Blocks, target: torch.Tensor, kernels: NativeKernels | None) -> None:
    """The weights themselves, to `target`: float32 or bf16 [rows, columns], contiguous, in RAM."""
    if target.shape != (source.rows, source.columns) or not target.is_contiguous():
        raise ValueError(f"[{source.rows}, {source.columns}] into {tuple(target.shape)}")
    if kernels is None or target.dtype not in (torch.float32, torch.bfloat16):
        target.copy_(torch.from_numpy(source.kind.dequantise(source.in_order.numpy())))
        return
    struct = source.struct
    sizes = (source.rows, source.columns, int(target.dtype == torch.float32))
    if kernels.unpack(kernels.pool, ctypes.addressof(struct), *sizes, target.data_ptr()):
        raise ValueError(f"blocks of an unknown type, {source.kind.name}")


Unpack = Callable[[TiledMatrix | Blocks], torch.Tensor]
"""A matrix -> its weights, bf16 [rows, columns], where it is."""


def unpacked(matrix: TiledMatrix | Blocks) -> torch.Tensor:
    """The definition for every `Unpack`; blocks pass through the host."""
    if isinstance(matrix, TiledMatrix):
        return dequantise(matrix)
    weights = matrix.kind.dequantise(matrix.in_order.cpu().numpy())
    return torch.from_numpy(weights).bfloat16().to(matrix.raw.device)


def set_table(sources: Sequence[Source], target: TiledMatrix) -> None:
    """Gives a target its table: that of the codes that it keeps, else its format's.

    Raises:
        ValueError: the sources' codes mean different tables.
    """
    table = target.shape.format.table
    tables = {each.kind.table if isinstance(each, Blocks) and _keeps(each, target) else table for each in sources}
    if target.table is not None and len(tables) > 1:
        raise ValueError("codes of two tables in one matrix")
    target.set_table(tables.pop())


def _keeps(source: Source, target: TiledMatrix) -> bool:
    return (source.kind.kept_in if isinstance(source, Blocks) else source.kept_in) is target.shape.format


def _coded(source: Source) -> CodedMatrix | None:
    return codes_of(source.kind, source.in_order.numpy()) if isinstance(source, Blocks) else source.coded()


def _values(source: Source) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return source.kind.dequantise(source.in_order.numpy()) if isinstance(source, Blocks) else source.values()


def _check(sources: Sequence[Source], target: TiledMatrix) -> None:
    shape = target.shape
    rows = [each.rows for each in sources]
    paired = len(sources) == 2 and shape.pairing is not Pairing.PLAIN and rows[0] == rows[1]
    if sum(rows) != shape.rows or not (len(sources) == 1 or paired):
        raise ValueError(f"{rows} rows for {shape.rows}")
    if any(each.columns != shape.columns for each in sources):
        raise ValueError(f"{[each.columns for each in sources]} columns for {shape.columns}")
    parts = target.parts.values()
    if not all(part.device.type == "cpu" and part.is_contiguous() for part in parts):
        raise ValueError("tiles are made in RAM")
    if {suffix: (tuple(part.shape), part.dtype) for suffix, part in target.parts.items()} != shape.parts:
        raise ValueError("a target of other sizes than its shape says")


def _repack_in_torch(sources: Sequence[Source], target: TiledMatrix) -> None:
    found: list[RecordCodes] = []
    for source in sources:
        coded = _coded(source) if _keeps(source, target) else None
        if coded is not None:
            found.append(keep_codes(coded, _FEW_ROUNDS))
        else:
            found.append(fit_codes(torch.from_numpy(_values(source)), target.shape.format, _FEW_ROUNDS))
    store_codes(found, target)


def quantise_natively(weight: torch.Tensor, target: TiledMatrix, kernels: NativeKernels, rounds: int = ROUNDS) -> None:
    """Fills `target` from `weight`: bf16 [rows, columns], contiguous, in RAM, like `target`."""
    struct = matrix_struct(target)
    kernels.quantise(kernels.pool, ctypes.addressof(struct), weight.data_ptr(), rounds)


def dequantise_natively(matrix: TiledMatrix, begin: int, end: int, out: torch.Tensor, kernels: NativeKernels) -> None:
    """Blocks [begin, end) of a matrix in RAM to `out`: bf16 [rows, columns], contiguous, paired like the matrix.

    The same values as `engine.formats.tiles.dequantise`.
    """
    struct = matrix_struct(matrix)
    kernels.dequantise(kernels.pool, ctypes.addressof(struct), begin, end, out.data_ptr())


def quantise(
    weight: torch.Tensor,
    target_format: TiledFormat,
    pairing: Pairing = Pairing.PLAIN,
    kernels: NativeKernels | None = None,
) -> TiledMatrix:
    """[rows, columns] -> the same in `target_format`, on the same device."""
    rows, columns = weight.shape
    target = TiledMatrix.empty(TiledShape(rows, columns, target_format, pairing), weight.device)
    quantise_into(weight, target, kernels)
    return target


def quantise_into(weight: torch.Tensor, target: TiledMatrix, kernels: NativeKernels | None = None) -> None:
    """Fills `target` from `weight` [rows, columns]: hundreds of megabytes per second and thread natively."""
    target.set_table()
    native = kernels is not None and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    if native and weight.device.type == "cpu" and target.weights.device.type == "cpu":
        assert kernels is not None
        quantise_natively(weight, target, kernels)
    else:
        quantise_in_torch(weight, target)


def quantise_record(
    layout: RecordLayout, plain: torch.Tensor, target: torch.Tensor, kernels: NativeKernels | None = None
) -> None:
    """Fills a record in tiles, uint8 [nbytes], from the same in plain numbers, both aligned as records are."""
    target.zero_()  # also between the parts, so that equal experts have equal bytes
    parts = layout.views(target[None])
    for name, values in layout.unquantised.views(plain[None]).items():
        if layout.is_tiled(name):
            quantise_into(values[0], layout.matrix(parts, name, 0), kernels)
        else:
            parts[name].copy_(values)
