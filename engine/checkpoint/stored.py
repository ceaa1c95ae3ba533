"""Checkpoints that are quantised already: which format keeps what each tensor holds.

Loading and the planner go by the same rules, from the table of tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.gguf import SUFFIX
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import LatentHeads, PackedEntry, RotaryRows, Rows, is_blocks
from engine.checkpoint.quantised.packings import ByRows
from engine.formats import FORMATS, LADDER, STORED, TiledFormat, format_of
from engine.formats.ggml import GGML
from engine.formats.int4 import INT4
from engine.formats.int8 import INT8

_CODES: dict[str, TiledFormat] = {f"{each.code_bits}-bit": each for each in (INT4, INT8)}
COARSER = 0.8
"""A format has to have so many times the bits of what is stored for `auto` to refit to it."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What a checkpoint becomes in memory if it runs as it is stored.

    Attributes:
        precisions: that `auto` chooses from.
        formats: names of all formats that something is kept in.
        experts: of each MoE layer, names of the formats of an expert's gate and up matrices, one where they are in the
            same, and of its down matrix.
        dense_bytes: everything but the experts, on a card.
        layers: the part of it that each layer has.
        tables: the part of it that is in tables whose rows are looked up, the embedding of tokens among them.
        layer_bytes_per_weight: of what is neither expert nor embedding nor head.
        is_repacked: whether experts' records are made of what is stored, without their numbers in between.
        in_place: the same where it is used as it lies in its files; None if that cannot be.
        is_in_place: whether this is that: what does not fit into memory is read from those files.
    """

    precisions: tuple[str, ...]
    formats: tuple[str, ...]
    experts: tuple[tuple[str, ...], ...]
    dense_bytes: int
    layers: tuple[int, ...]
    layer_bytes_per_weight: float
    head_bytes_per_weight: float
    is_repacked: bool
    tables: int = 0
    in_place: StoredWeights | None = None
    is_in_place: bool = False

    @property
    def words(self) -> str:
        """For people, such as `as stored (4-bit and 8-bit)`."""
        found = sorted(map(format_of, self.formats), key=lambda each: each.bits)
        sizes = list(dict.fromkeys(each.words.partition(",")[0] for each in found))
        *most, last = sizes
        return f"as stored ({', '.join(most)} and {last})" if most else f"as stored ({last})"


def precisions_of(entries: Iterable[TensorEntry], weights: int) -> tuple[str, ...]:
    """The precisions that `auto` chooses from: if most is in codes, as they are stored, and what is much smaller; a
    GGUF file, which somebody chose for its type, only as it is, or in less where that is of plain numbers.

    Args:
        weights: that the tensors hold.
    """
    entries = list(entries)
    in_file = bool(entries) and all(is_in_gguf(part) for entry in entries for part in entry.stored)
    nbytes = sum(entry.nbytes for entry in entries)
    types = [type_of(pieces_of(entry)[0]) for entry in entries]
    if 2 * sum(entry.nbytes for entry, kind in zip(entries, types, strict=True) if kind is not None) <= nbytes:
        if not in_file:
            return LADDER
    elif any(kind in GGML for kind in types):
        return (STORED,)
    bits = 8 * nbytes / max(weights, 1)
    return (STORED, *(name for name in LADDER if FORMATS[name].bits < COARSER * bits))


def type_of(entry: TensorEntry) -> str | None:
    """The type of a tensor's blocks, or what codes that are kept are called; `None` for anything else."""
    kept = format_of_codes(entry)
    if kept is not None:
        assert isinstance(entry, PackedEntry)
        assert isinstance(entry.packing, ByRows)
        return f"{kept.code_bits}-bit {entry.packing.words}"
    if isinstance(entry, PackedEntry):
        return type_of(entry.sources[0]) if len(entry.sources) == 1 else None
    return entry.dtype if is_blocks(entry.dtype) else None


def target_of(name: str) -> TiledFormat | None:
    return GGML[name].in_tiles if name in GGML else _CODES[name.partition(" ")[0]]


def common_format(entries: Iterable[TensorEntry]) -> TiledFormat | None:
    """The format of a matrix made of these tensors: int8 if no other holds the codes of all of them.

    `None` stands for plain numbers.
    """
    found = {type_of(piece) for entry in entries for piece in pieces_of(entry)}
    named = [name for name in found if name is not None]
    if not named or len(named) < len(found):
        return None
    formats = {(target_of(name), GGML[name].table if name in GGML else None) for name in named}
    return formats.pop()[0] if len(formats) == 1 else INT8


def beside(formats: Iterable[TiledFormat | None]) -> list[TiledFormat | None]:
    """The formats of an expert's matrices, given those of each: kernels take plain and tiled ones together nowhere."""
    formats = list(formats)
    return [each or INT8 for each in formats] if any(formats) else formats


def linear_format(entry: TensorEntry) -> TiledFormat | None:
    """The format that loses least of the weight of a linear layer; `None` for plain numbers."""
    stored = in_rows(entry)
    if stored is not None and len(stored.shape) == 2:
        return GGML[stored.dtype].in_tiles
    return format_of_codes(entry)


def format_of_codes(entry: TensorEntry) -> TiledFormat | None:
    if isinstance(entry, PackedEntry) and isinstance(entry.packing, ByRows):
        return entry.packing.kept_in(entry.sources, entry.shape[1])
    return None


def is_in_gguf(entry: TensorEntry) -> bool:
    """Whether it lies in a GGUF file; Ollama's are called by their digest."""
    return entry.file.suffix.lower() == SUFFIX or entry.file.name.startswith("sha256-")


def in_rows(entry: TensorEntry) -> TensorEntry | None:
    """The stored tensor that has a tensor's rows, perhaps in another order, in one of ggml's types, which include plain
    numbers; what several of one type are together, if blocks of them have its rows; `None` if there is none."""
    if isinstance(entry, PackedEntry):
        if order_of(entry) is None:
            return None
        first, *others = entry.sources
        if others:
            return replace(first, shape=entry.shape, nbytes=entry.nbytes)
        entry = first
    return entry if entry.dtype in GGML else None


def in_columns(entry: TensorEntry) -> tuple[TensorEntry, NDArray[np.int64]] | None:
    """The stored matrix of blocks whose columns a matrix has in another order, and which of them come one after the
    other; `None` if there is none."""
    if not (isinstance(entry, PackedEntry) and len(entry.sources) == 1 and isinstance(entry.packing, Rows)):
        return None
    (stored,), packing = entry.sources, entry.packing
    if packing.axis != -1 or packing.order is None or packing.transposed or len(stored.shape) != 2:
        return None
    return (stored, packing.order.astype(np.int64)) if is_blocks(stored.dtype) else None


def mixed_rows(entry: TensorEntry) -> tuple[Sequence[TensorEntry], NDArray[np.int64]] | None:
    """The stored matrices of blocks whose rows a matrix has in an order that mixes them, and this order; `None` if
    there are none."""
    packing = rows_of(entry)
    if packing is None or packing.order is None or packing.axis != -2 or packing.transposed:
        return None
    assert isinstance(entry, PackedEntry)
    usable = len(entry.sources) > 1 and all(is_blocks(each.dtype) and len(each.shape) == 2 for each in entry.sources)
    return (entry.sources, packing.order.astype(np.int64)) if usable else None


def heads_in_rows(entry: TensorEntry) -> tuple[TensorEntry, TensorEntry] | None:
    """The stacks of each head's matrix of keys, transposed, and of values that a matrix is made of, if both are in
    ggml's types; see `LatentHeads`."""
    if not (isinstance(entry, PackedEntry) and isinstance(entry.packing, LatentHeads)):
        return None
    keys, values = entry.sources
    return (keys, values) if keys.dtype in GGML and values.dtype in GGML else None


def pieces_of(entry: TensorEntry) -> Sequence[TensorEntry]:
    """The matrices that one is made of: those whose rows lie below one another, or alternate; else it alone."""
    packing = rows_of(entry)
    if packing is None or packing.order is not None or packing.axis != -2:
        return [entry]
    assert isinstance(entry, PackedEntry)
    return entry.sources


def rows_of(entry: TensorEntry) -> Rows | None:
    return entry.packing if isinstance(entry, PackedEntry) and isinstance(entry.packing, Rows) else None


def order_of(entry: PackedEntry) -> NDArray[np.int64] | None:
    """Which rows of its only source a matrix has one after the other, or of several in the same blocks that lie below
    one another; `None` if that is not what it is made of."""
    packing = rows_of(entry)
    if len(entry.sources) > 1:
        is_one_type = {each.dtype for each in entry.sources} == {entry.dtype} and is_blocks(entry.dtype)
        is_joined = packing is not None and packing.are_below and is_one_type and len(entry.shape) == 2
        return np.arange(entry.shape[0]) if is_joined else None
    if isinstance(entry.packing, RotaryRows):
        return entry.packing.reorder(np.arange(entry.sources[0].shape[0], dtype=np.int64))
    if packing is not None and packing.axis == -2 and not packing.transposed:
        return None if packing.order is None else packing.order.astype(np.int64)
    return None
