"""Memory for records: in huge pages where available, and returned to the system record by record.

With 4 KiB pages, page faults slow down reads from a fast disk, kernels streaming through records may miss the TLB once
per page, and processors end what they fetch ahead at each page's end; 2 MiB pages divide all of them by 512.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch

from engine.experts.mapped_memory import HUGE as _HUGE
from engine.experts.mapped_memory import map_in_huge_pages

_BLOCK = 32 * _HUGE
_APART = 64
"""Bytes that tensors of one block begin at multiples of: a line of the cache."""
_HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")

_GIVE_BACK: int | None = getattr(mmap, "MADV_FREE" if sys.platform == "darwin" else "MADV_DONTNEED", None)
CAN_GIVE_BACK = _GIVE_BACK is not None
"""Whether single pages can be returned to the system.  Otherwise memory is freed only as a whole."""


class RecordMemory:
    """Memory for records, [count, nbytes] uint8, page-aligned.  Uses RAM only once written to.

    Raises:
        MemoryError: the system refuses the allocation.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        size = count * nbytes
        self._map, self._skip = map_in_huge_pages(size)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.records = whole[self._skip : self._skip + size].view(count, nbytes)

    def give_back(self, rows: Iterable[int]) -> None:
        """Returns the memory of these records to the system.  Their content is lost; they can be written again."""
        if _GIVE_BACK is None or sys.platform == "win32":
            return
        nbytes, page = self.records.shape[1], mmap.PAGESIZE
        for first, last in _runs(sorted(rows)):
            begin = -(-(self._skip + first * nbytes) // page) * page
            end = (self._skip + (last + 1) * nbytes) // page * page
            if end > begin:
                self._map.madvise(_GIVE_BACK, begin, end - begin)


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
        """As `torch.empty`, which it is for other memory than RAM, and where there are no huge pages.

        Raises:
            MemoryError: the system refuses a further block.
        """
        if not _HAS_HUGE_PAGES or (device is not None and device.type != "cpu"):
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        nbytes = math.prod(shape) * dtype.itemsize
        if self._used + nbytes > self._block.numel():
            self._block, self._used = RecordMemory(1, max(nbytes, _BLOCK)).records[0], 0
        begin = self._used
        self._used += -(-nbytes // _APART) * _APART
        return self._block[begin : begin + nbytes].view(dtype).view(*shape)


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    """Sorted numbers -> (first, last) of each run of consecutive ones, to save system calls."""
    first = last = -1
    for row in rows:
        if row == last + 1 and first >= 0:
            last = row
            continue
        if first >= 0:
            yield first, last
        first = last = row
    if first >= 0:
        yield first, last
