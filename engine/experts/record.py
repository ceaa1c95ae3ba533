"""Memory for records, and the bank: all experts of a model, outside its modules, in one memory.

It is in huge pages where available, and returned to the system record by record.

With 4 KiB pages, page faults slow down reads from a fast disk, kernels streaming through records may miss the TLB once
per page, and processors end what they fetch ahead at each page's end; 2 MiB pages divide all of them by 512.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.common.footprint import RECORD_ALIGNMENT
from engine.devices.host_memory import HostMemory
from engine.experts.file_image import HUGE as _HUGE
from engine.experts.file_image import map_in_huge_pages
from engine.formats.tiles import RecordLayout
from engine.kernels.interface import LayerRecords
from engine.kernels.native.paged_attention import discard

_BLOCK = 32 * _HUGE
_APART = 64
"""Bytes that tensors of one block begin at multiples of: a line of the cache."""
_HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


class RecordMemory:
    """Memory for records, [count, nbytes] uint8, page-aligned.  Uses RAM only once written to."""

    def __init__(self, count: int, nbytes: int) -> None:
        size = count * nbytes
        memory, skip = map_in_huge_pages(size)
        self.records = torch.frombuffer(memory, dtype=torch.uint8)[skip : skip + size].view(count, nbytes)

    def give_back(self, rows: Iterable[int]) -> None:
        """Returns the memory of these records to the system.  Their content is lost; they can be written again."""
        discard(self.records, rows)


def empty_in_huge_pages(
    shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """`torch.empty`, in huge pages where it is large enough for them or fills them, in RAM."""
    nbytes = math.prod(shape) * dtype.itemsize
    too_small = nbytes < 2 * _HUGE and (nbytes == 0 or nbytes % _HUGE)
    if too_small or (device is not None and device.type != "cpu"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return RecordMemory(1, nbytes).records[0].view(dtype).view(*shape)


class HugePages:
    """Tensors side by side in huge pages: for many that live equally long, some of them smaller than a page.

    A block of them returns to the system once none of its tensors is left.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """As `torch.empty`, which it is for other memory than RAM, and where there are no huge pages."""
        if not _HAS_HUGE_PAGES or (device is not None and device.type != "cpu"):
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        nbytes = math.prod(shape) * dtype.itemsize
        if self._used + nbytes > self._block.numel():
            self._block, self._used = RecordMemory(1, max(nbytes, _BLOCK)).records[0], 0
        begin = self._used
        self._used += -(-nbytes // _APART) * _APART
        return self._block[begin : begin + nbytes].view(dtype).view(*shape)


_IN_HUGE_PAGES = 4 * 2**20
"""Size in bytes above which huge pages justify a separate mapping."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    name: str
    num_experts: int
    layout: RecordLayout

    @property
    def nbytes(self) -> int:
        return self.num_experts * self.layout.nbytes


@dataclass(frozen=True)
class RecordTable:
    """The layers whose records lie on disk, numbered in this order."""

    layers: tuple[LayerSpec, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @cached_property
    def experts(self) -> dict[RecordLayout, tuple[int, int]]:
        """How many experts have records of a layout: in all, and at most in a layer."""
        found: dict[RecordLayout, tuple[int, int]] = {}
        for layer in self.layers:
            whole, most = found.get(layer.layout, (0, 0))
            found[layer.layout] = whole + layer.num_experts, max(most, layer.num_experts)
        return found

    @cached_property
    def index_of(self) -> dict[str, int]:
        return {layer.name: index for index, layer in enumerate(self.layers)}


def allocate_records(count: int, layout: RecordLayout, device: torch.device) -> torch.Tensor:
    """Page-aligned memory for `count` records: [count, layout.nbytes], uint8, not initialised."""
    if device.type == "cpu" and count * layout.nbytes >= _IN_HUGE_PAGES:
        return RecordMemory(count, layout.nbytes).records
    raw = torch.empty(count * layout.nbytes + RECORD_ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % RECORD_ALIGNMENT
    return raw[skip : skip + count * layout.nbytes].view(count, layout.nbytes)


class ExpertBank:
    """All experts of a model, by the name of their module."""

    def __init__(
        self,
        device: torch.device,
        host_memory: HostMemory | None = None,
        elsewhere: Mapping[str, torch.device] | None = None,
    ) -> None:
        self.device = device
        self._elsewhere = elsewhere or {}
        self.layers: dict[str, LayerRecords] = {}
        self._host_memory = host_memory

    def add_layer(
        self, name: str, num_experts: int, layout: RecordLayout, records: torch.Tensor | None = None
    ) -> LayerRecords:
        """Allocates the records of one experts module, which the caller fills.

        Args:
            records: [E, nbytes], page-aligned, that are there or on their way; only if it `takes_memory`.
        """
        if records is None and self._host_memory is None:
            records = allocate_records(num_experts, layout, self._elsewhere.get(name, self.device))
        elif records is None and self._host_memory is not None:
            memory = self._host_memory.allocate(num_experts * layout.nbytes, unit=layout.nbytes)
            records = memory.view(num_experts, layout.nbytes)
        assert records is not None
        layer = self.layers[name] = LayerRecords(name, layout, records)
        return layer

    @staticmethod
    @contextmanager
    def filling(layer: LayerRecords) -> Iterator[torch.Tensor]:
        """Memory in RAM for the records, which are as the caller leaves it from then on."""
        here = layer.device.type == "cpu"
        records = layer.records
        if not here:
            records = allocate_records(layer.num_experts, layer.layout, torch.device("cpu"))
        yield records
        if not here:
            layer.records.copy_(records)

    @property
    def takes_memory(self) -> bool:
        """Whether records in plain memory are as good as those that it would allocate."""
        return self._host_memory is None and self.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def close(self) -> None:
        """Frees the records.  A model still bound to them raises an error when used."""
        for layer in self.layers.values():
            records = layer.records
            layer.forget()
            if self._host_memory is not None:
                self._host_memory.release(records)
        self.layers.clear()
