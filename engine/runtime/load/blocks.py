"""Tensors in blocks or made of several, read as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.checkpoint.expert_index import ExpertSource
from engine.checkpoint.gguf.types import BY_NAME, BlockType
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, as_array, is_blocks
from engine.checkpoint.quantised.packings import ByRows, Codes
from engine.checkpoint.stored import format_of_codes, in_rows, order_of
from engine.kernels.repack import Blocks


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

    @property
    def sources(self) -> tuple[TensorEntry | ExpertSource, ...]:
        """What is read, the parts of `StoredCodes` as well."""
        return (self.source,)

    def in_memory(self, raw: Sequence[torch.Tensor]) -> Blocks:
        """The same once its sources have been read: uint8 [bytes] of each."""
        return Blocks(self.kind, raw[0].view(self.rows, -1), self.order)


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

    @property
    def sources(self) -> tuple[TensorEntry | ExpertSource, ...]:
        """See `StoredBlocks`."""
        return self.source.sources

    def in_memory(self, raw: Sequence[torch.Tensor]) -> Codes:
        """See `StoredBlocks`.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`.
        """
        entries = self.source.sources
        arrays = [as_array(entry, each.numpy()) for entry, each in zip(entries, raw, strict=True)]
        return self.packing.codes_of(entries, arrays, slice(0, self.rows))


Stored = StoredBlocks | StoredCodes


def stored_of(source: TensorEntry | ExpertSource) -> Stored | None:
    """A matrix as a checkpoint stores it quantised; `None` if it does not, or no record keeps its codes."""
    entry = source if isinstance(source, TensorEntry) else source.entry
    if isinstance(entry, PackedEntry) and isinstance(entry.packing, ByRows):
        return StoredCodes(entry, entry.packing) if format_of_codes(entry) is not None else None
    found = blocks_of(source)
    return found if found is not None and is_blocks(found.kind.name) else None


def blocks_of(source: TensorEntry | ExpertSource) -> StoredBlocks | None:
    """The rows of a matrix, or of a row of a stack of them, in blocks or of plain numbers; `None` if it is stored
    otherwise."""
    entry, row = (source, None) if isinstance(source, TensorEntry) else (source.entry, source.row)
    stored, order = in_rows(entry), None
    if stored is None or (stored is not entry and row is not None):
        return None
    if stored is not entry:
        assert isinstance(entry, PackedEntry)
        source, order = stored, torch.from_numpy(order_of(entry))
    shape = stored.shape if row is None else stored.shape[1:]
    return StoredBlocks(BY_NAME[stored.dtype], source, shape[0], order) if len(shape) == 2 else None
