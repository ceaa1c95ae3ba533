"""Tensors in blocks, read as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.checkpoint.expert_index import ExpertSource
from engine.checkpoint.gguf.types import BY_NAME, BlockType
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, RotaryRows, is_blocks
from engine.kernels.repack import Blocks

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


def blocks_of(source: TensorEntry | ExpertSource) -> StoredBlocks | None:
    """The blocks of a matrix, or of a row of a stack of them; `None` if it is stored otherwise."""
    entry, row = (source, None) if isinstance(source, TensorEntry) else (source.entry, source.row)
    order = None
    if isinstance(entry, PackedEntry):
        if not isinstance(entry.packing, RotaryRows) or len(entry.sources) != 1 or row is not None:
            return None
        (entry,) = entry.sources
        order = torch.from_numpy(_reordered(entry, source))
        source = entry
    shape = entry.shape if row is None else entry.shape[1:]
    if not is_blocks(entry.dtype) or len(shape) != 2:
        return None
    return StoredBlocks(BY_NAME[entry.dtype], source, shape[0], order)


def _reordered(entry: TensorEntry, source: TensorEntry | ExpertSource) -> np.ndarray[Any, Any]:
    assert isinstance(source, PackedEntry)
    assert isinstance(source.packing, RotaryRows)
    return source.packing.reorder(np.arange(entry.shape[0], dtype=np.int64))
