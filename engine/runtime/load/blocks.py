"""Tensors in blocks or made of several, read as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.checkpoint.expert_index import ExpertSource
from engine.checkpoint.gguf.types import BY_NAME, BlockType
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry
from engine.checkpoint.quantised.packings import ByRows
from engine.checkpoint.stored import format_of_codes, in_blocks, order_of
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
    stored, order = in_blocks(entry), None
    if stored is None or (stored is not entry and row is not None):
        return None
    if stored is not entry:
        assert isinstance(entry, PackedEntry)
        source, order = stored, torch.from_numpy(order_of(entry))
    shape = stored.shape if row is None else stored.shape[1:]
    return StoredBlocks(BY_NAME[stored.dtype], source, shape[0], order) if len(shape) == 2 else None
