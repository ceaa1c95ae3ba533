"""Where keys and values lie on a card, in a table that stays where it is: pages may move, what reads the table need not
know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType


class PageTable:
    """The pages of some sequences in one attention layer.

    Args:
        parts: tensors per sequence: keys, values and, where the type has them, the scales of both.
        pages: room for so many of a sequence.

    Attributes:
        entries: int64 [sequences, parts, 1 + pages]: the bytes from one head to the next, then the address of each
            page's first head.
    """

    def __init__(self, kv_type: KvType, sequences: int, pages: int, device: torch.device) -> None:
        parts = 4 if kv_type is KvType.INT8 else 2
        self.kv_type = kv_type
        self.entries = torch.zeros(sequences, parts, 1 + pages, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, kv_type: KvType, entries: torch.Tensor) -> PageTable:
        """Whose entries are others' to write."""
        table = cls(kv_type, 0, 0, entries.device)
        table.entries = entries
        return table

    @property
    def arguments(self) -> dict[str, Any]:
        """Of kernels that read it."""
        return {"table": self.entries, "table_step": self.entries.stride(0), "part_step": self.entries.stride(1)}

    @property
    def tokens(self) -> int:
        """Room for so many of a sequence."""
        return (self.entries.shape[2] - 1) * PAGE_TOKENS

    def set_rows(self, sequence: int, parts: Sequence[torch.Tensor]) -> None:
        """The sequence lies in buffers [heads, rows, ..], whose rows follow each other.

        Raises:
            ValueError: there are more rows than the table has room for.
        """
        rows = parts[0].shape[1]
        if rows > self.tokens:
            raise ValueError(f"{rows} rows in a table for {self.tokens}")
        pages = -(-rows // PAGE_TOKENS)
        entries = torch.zeros(len(parts), 1 + pages, dtype=torch.int64)
        for part, buffer in enumerate(parts):
            step = PAGE_TOKENS * buffer.stride(1) * buffer.element_size()
            entries[part, 0] = buffer.stride(0) * buffer.element_size()
            entries[part, 1:] = buffer.data_ptr() + step * torch.arange(pages)
        self.entries[sequence, :, : 1 + pages].copy_(entries)

    @staticmethod
    def entries_of(pages: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Entries on the host of sequences in these pages, int64 [sequences, n], of parts as of `set_pages`."""
        count, most = pages.shape
        entries = torch.empty(count, len(parts), 1 + most, dtype=torch.int64)
        for part, held in enumerate(parts):
            entries[:, part, 0] = held.stride(1) * held.element_size()
            entries[:, part, 1:] = held.data_ptr() + held.stride(0) * held.element_size() * pages
        return entries

    def set_pages(self, sequence: int, pages: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """The sequence lies in these pages, int [n], of parts [pages, heads, PAGE_TOKENS, ..]."""
        numbers = pages.to(torch.int64).cpu()
        entries = torch.zeros(len(parts), 1 + len(numbers), dtype=torch.int64)
        for part, held in enumerate(parts):
            entries[part, 0] = held.stride(1) * held.element_size()
            entries[part, 1:] = held.data_ptr() + held.stride(0) * held.element_size() * numbers
        self.entries[sequence, :, : 1 + len(numbers)].copy_(entries)
