"""Tensors in blocks or made of several, read as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.checkpoint.expert_index import ExpertSource
from engine.checkpoint.gguf.types import BY_NAME, BlockType
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, RotaryRows, Rows, is_blocks
from engine.checkpoint.quantised.packings import ByRows
from engine.formats.tiles import RecordCodes, TiledMatrix, fit_codes, keep_codes, store_codes
from engine.formats.weight_format import TiledFormat
from engine.kernels.repack import ROUNDS, Blocks

if TYPE_CHECKING:
    from engine.runtime.load.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A tensor in blocks, of which whole rows may come in another order.

    Attributes:
        source: what is read.
        rows: how many it has; `order` says which of them come one after the other, if not all as they are.
    """

    kind: BlockType
    source: TensorEntry | ExpertSource
    rows: int
    order: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        """Weights of a row."""
        return self.source.nbytes // self.rows // self.kind.nbytes * self.kind.elements

    def read(self, reader: TensorReader) -> Blocks:
        """Reads them.

        Raises:
            EngineError, RequestCancelled: as `TensorReader.read`.
        """
        raw = torch.empty(self.rows, self.source.nbytes // self.rows, dtype=torch.uint8)
        reader.read_into([(self.source, raw)])
        return self.in_memory(raw)

    def in_memory(self, raw: torch.Tensor) -> Blocks:
        """The same once they have been read: uint8 [rows, bytes of a row]."""
        return Blocks(self.kind, raw, self.order)


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """A matrix whose codes, scales and zeros are tensors of their own."""

    source: PackedEntry
    packing: ByRows

    @property
    def rows(self) -> int:
        """How many it has."""
        return self.source.shape[0]

    @property
    def columns(self) -> int:
        """Weights of a row."""
        return self.source.shape[1]

    def read(self, reader: TensorReader, target_format: TiledFormat) -> RecordCodes:
        """Reads them: the codes themselves in the format that keeps them, else their values fitted to it.

        Raises:
            EngineError, RequestCancelled: as `TensorReader.read`.
        """
        arrays = reader.read_arrays(self.source)
        coded = self.packing.codes(self.source.sources, arrays)
        if coded is not None and coded.format is target_format:
            return keep_codes(coded, ROUNDS)
        values = self.packing.unpack(self.source.sources, arrays)
        return fit_codes(torch.from_numpy(values), target_format, ROUNDS)


Stored = StoredBlocks | StoredCodes


def stored_of(source: TensorEntry | ExpertSource) -> Stored | None:
    """A matrix as a checkpoint stores it quantised; `None` if it does not, or no record keeps its codes."""
    entry = source if isinstance(source, TensorEntry) else source.entry
    if isinstance(entry, PackedEntry) and isinstance(entry.packing, ByRows):
        return StoredCodes(entry, entry.packing) if format_of_codes(entry) is not None else None
    return blocks_of(source)


def format_of_codes(entry: TensorEntry) -> TiledFormat | None:
    """The format that keeps the codes of a tensor that is made of several."""
    if isinstance(entry, PackedEntry) and isinstance(entry.packing, ByRows):
        return entry.packing.kept_in(entry.sources, entry.shape[1])
    return None


def store_coded(sources: Sequence[StoredCodes], target: TiledMatrix, reader: TensorReader) -> None:
    """Fills a matrix of all rows of one source, or first of gate and then of up rows.

    Raises:
        EngineError, RequestCancelled: as `TensorReader.read`.
    """
    target.set_table(target.shape.format.table)
    store_codes([source.read(reader, target.shape.format) for source in sources], target)


def blocks_of(source: TensorEntry | ExpertSource) -> StoredBlocks | None:
    """The blocks of a matrix, or of a row of a stack of them; `None` if it is stored otherwise."""
    entry, row = (source, None) if isinstance(source, TensorEntry) else (source.entry, source.row)
    order = None
    if isinstance(entry, PackedEntry):
        places = _order_of(entry)
        if places is None or row is not None:
            return None
        (source,) = entry.sources
        entry, order = source, torch.from_numpy(places)
    shape = entry.shape if row is None else entry.shape[1:]
    if not is_blocks(entry.dtype) or len(shape) != 2:
        return None
    return StoredBlocks(BY_NAME[entry.dtype], source, shape[0], order)


def pieces_of(source: TensorEntry | ExpertSource) -> list[TensorEntry | ExpertSource]:
    """The matrices that one is made of: those whose rows lie below one another, or alternate; else it alone."""
    entry, row = (source, None) if isinstance(source, TensorEntry) else (source.entry, source.row)
    packing = rows_of(source)
    if packing is None or packing.order is not None or packing.axis != -2:
        return [source]
    assert isinstance(entry, PackedEntry)
    return [each if row is None else ExpertSource(each, each.key, row) for each in entry.sources]


def rows_of(source: TensorEntry | ExpertSource) -> Rows | None:
    """How the rows of other tensors make this one, if they do."""
    entry = source if isinstance(source, TensorEntry) else source.entry
    return entry.packing if isinstance(entry, PackedEntry) and isinstance(entry.packing, Rows) else None


def _order_of(entry: PackedEntry) -> np.ndarray[Any, Any] | None:
    """Which rows of its only source a matrix has one after the other; `None` if that is not what it is made of."""
    if len(entry.sources) != 1:
        return None
    if isinstance(entry.packing, RotaryRows):
        return entry.packing.reorder(np.arange(entry.sources[0].shape[0], dtype=np.int64))
    if isinstance(entry.packing, Rows) and entry.packing.axis == -2 and not entry.packing.transposed:
        return None if entry.packing.order is None else entry.packing.order.astype(np.int64)
    return None
