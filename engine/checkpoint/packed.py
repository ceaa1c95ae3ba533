"""Tensors that are stored in a form of their own: as blocks of codes, in another order, or as several tensors.

`TensorReader.read` gives them as plain numbers by way of `unpacked`.  Whole small files are read and written with numpy
alone: it has no bfloat16, which is kept as uint16.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

from engine.checkpoint.headers import TensorEntry
from engine.formats.coded import from_bfloat16
from engine.formats.ggml import GGML

_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8",
    "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "F8_E4M3": "u1",
}  # fmt: skip
_AT_ONCE = 2**24
"""Numbers that are unpacked at once: 64 MiB of float32."""

Array = NDArray[Any]
Floats = NDArray[np.float32]


def _e4m3() -> Floats:
    """The value of every byte as F8_E4M3 (OCP's "fn": no infinities): sign, 4 bits of exponent + 7, 3 of fraction."""
    byte = np.arange(128)
    exponent, fraction = byte >> 3, (byte & 7) / 8
    positive = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    positive[127] = np.nan
    return np.concatenate((positive, -positive)).astype(np.float32)


_E4M3 = _e4m3()


class Packing(ABC):
    """How the tensors that are stored make the tensor that is meant."""

    __slots__ = ()

    @abstractmethod
    def unpack(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> Floats:
        """The tensor, from its sources as `as_array` gives them; of one expert if they all hold one row of stacks."""

    def pieces(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> Iterator[Floats]:
        """The same, perhaps some rows at a time."""
        yield self.unpack(entries, arrays)


@dataclass(frozen=True, slots=True)
class PackedEntry(TensorEntry):
    """A tensor that is made of others.

    `shape` is of the result, `nbytes` of all sources; `dtype`, `file`, `key` and `offset` are for messages only.
    """

    sources: tuple[TensorEntry, ...]
    packing: Packing

    @classmethod
    def of(cls, key: str, shape: tuple[int, ...], sources: Sequence[TensorEntry], packing: Packing) -> PackedEntry:
        first, nbytes = sources[0], sum(source.nbytes for source in sources)
        return cls(first.file, key, first.dtype, shape, first.offset, nbytes, tuple(sources), packing)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for source in self.sources for file in source.files)

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return tuple(part for source in self.sources for part in source.stored)

    def row(self, index: int) -> TensorEntry:
        sources = tuple(source.row(index) for source in self.sources)
        nbytes = sum(source.nbytes for source in sources)
        return replace(self, shape=(1, *self.shape[1:]), nbytes=nbytes, sources=sources)


@dataclass(frozen=True, slots=True)
class RotaryRows(Packing):
    """Rows of queries or keys whose heads are in the order of adjacent pairs, put back in that of two halves.

    Some architectures of ggml rotate element 2i of a head with 2i + 1, transformers element i with i + d/2; whoever
    writes such a file reorders the rows; this puts them back.
    """

    heads: int

    def reorder(self, array: Array) -> Array:
        """[heads * d, ...], numbers or blocks of them, in the other order of rows."""
        pairs = array.reshape(self.heads, -1, 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)

    def unpack(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> Floats:
        return numbers(entries[0].dtype, self.reorder(arrays[0]))


@dataclass(frozen=True, slots=True, eq=False)
class Rows(Packing):
    """Rows of all sources one below the other, of which a tensor has some in another order.

    Attributes:
        order: for each row of the result, its place among the sources' rows; `None`: as they are.
        axis: of the rows, of a single expert if the sources are stacks: -2 of matrices, -1 of vectors or for columns.
        transposed: whether the result has the last two dimensions swapped.
        alternating: whether there is a row of each source in turn instead; then there is no `order`.
    """

    order: NDArray[np.intp] | None = None
    axis: int = -2
    transposed: bool = False
    alternating: bool = False

    @property
    def are_below(self) -> bool:
        return self.order is None and self.axis == -2 and not self.transposed and not self.alternating

    def pieces(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> Iterator[Floats]:
        if self.are_below and arrays[0].ndim == 2:
            yield from (numbers(entry.dtype, array) for entry, array in zip(entries, arrays, strict=True))
        else:
            yield self.unpack(entries, arrays)

    def unpack(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> Floats:
        values = [numbers(entry.dtype, array) for entry, array in zip(entries, arrays, strict=True)]
        whole = values[0] if len(values) == 1 else np.concatenate(values, self.axis)
        if self.alternating:
            rows = np.arange(whole.shape[self.axis]).reshape(len(values), -1).T.reshape(-1)
            whole = whole.take(rows, self.axis)
        elif self.order is not None:
            whole = whole.take(self.order, self.axis)
        return np.ascontiguousarray(whole.swapaxes(-1, -2) if self.transposed else whole)


@dataclass(frozen=True, slots=True)
class Changed(Packing):
    """Numbers that are stored as a function of them: `lowered` by one, `scaled`, or the `logarithm` of what is
    stored, which llama.cpp has with or without its sign, or there are zeros instead.
    """

    how: Literal["lowered", "scaled", "logarithm", "nothing"]
    order: NDArray[np.intp] | None = None
    factor: float = 1.0

    def unpack(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> Floats:
        values = numbers(entries[0].dtype, arrays[0])
        if self.how == "nothing":
            return np.zeros((1, values.size), np.float32)
        if self.how == "scaled":
            return values * np.float32(self.factor)
        with np.errstate(all="ignore"):  # a broken file may hold anything
            values = values - np.float32(1) if self.how == "lowered" else np.log(np.abs(values))
        return values if self.order is None else values.reshape(-1)[self.order]


@dataclass(frozen=True, slots=True)
class LatentHeads(Packing):
    """What multi-head latent attention makes keys and values of, stored as two stacks of one matrix per head.

    [heads, latent, key width] and [heads, value width, latent] -> [heads * (key width + value width), latent].
    """

    def unpack(self, entries: Sequence[TensorEntry], arrays: Sequence[Array]) -> Floats:
        keys, values = (numbers(entry.dtype, array) for entry, array in zip(entries, arrays, strict=True))
        heads = np.concatenate((keys.swapaxes(1, 2), values), 1)
        return heads.reshape(-1, heads.shape[-1])


def is_packed(entry: TensorEntry) -> bool:
    return isinstance(entry, PackedEntry) or is_blocks(entry.dtype)


def is_blocks(dtype: str) -> bool:
    return dtype in GGML and GGML[dtype].is_blocks


def as_array(entry: TensorEntry, raw: NDArray[np.uint8]) -> Array:
    """The bytes of a stored tensor, [nbytes], as numpy has it.

    Returns:
        Numbers in the tensor's shape; the bits of bfloat16 as uint16; blocks as uint8 [..., bytes of a row].
    """
    if is_blocks(entry.dtype):
        return raw.reshape(*entry.shape[:-1], -1)
    return raw.view("<u2" if entry.dtype == "BF16" else _NUMPY[entry.dtype]).reshape(entry.shape)


def numbers(dtype: str, array: Array) -> Floats:
    if is_blocks(dtype):
        return GGML[dtype].dequantise(array)
    if dtype == "BF16":
        return from_bfloat16(array)
    if dtype == "F8_E4M3":
        return _E4M3[array]
    return array.astype(np.float32, copy=False)


def unpacked(entry: TensorEntry, arrays: Sequence[Array]) -> Iterator[Floats]:
    """The tensor's numbers, from its sources as `as_array` gives them: pieces of its first dimension, one by one."""
    if isinstance(entry, PackedEntry):
        yield from entry.packing.pieces(entry.sources, arrays)
        return
    (array,) = arrays
    rows = max(1, _AT_ONCE * len(array) // max(entry.numel, 1))
    for begin in range(0, len(array), rows):
        yield numbers(entry.dtype, array[begin : begin + rows])


_DTYPES: dict[str, Any] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I16": np.dtype("<i2"),
    "U8": np.dtype("u1"),
}
_NAMES = {np.dtype("<u2"): "BF16", np.dtype("<f4"): "F32"}
_ALIGNMENT = 64

Tensors = dict[str, NDArray[Any]]


def read_safetensors(path: Path) -> Tensors:
    """Every tensor of a small file, in memory; bfloat16 as uint16 bits.

    Raises:
        safetensors.SafetensorError, KeyError: if the file is damaged or holds another type.
    """
    return {
        name: np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Writes uint16 arrays as bfloat16 and float32 arrays unchanged, flushed to disk.

    Not atomic: the caller moves the file to its place.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces pad the header (the format allows it) so that the data starts aligned for the kernels that map it.
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data)
        file.flush()
        os.fsync(file.fileno())
