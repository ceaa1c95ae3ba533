"""Memory for records: in huge pages where the system has them, and given back to it record by record.

A page fault for every 4 KiB is work while a fast disk reads, and kernels that stream through records may miss the TLB
once for each: 2 MiB pages need a five-hundredth of both.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterable, Iterator

import torch

_HUGE = 2 * 2**20
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: address space alone is not counted as memory."""

_GIVE_BACK: int | None = getattr(mmap, "MADV_FREE" if sys.platform == "darwin" else "MADV_DONTNEED", None)
CAN_GIVE_BACK = _GIVE_BACK is not None
"""Whether the system takes single pages back.  Where it does not, they stay with us until all of them go."""


class RecordMemory:
    """Room for records, [count, nbytes] uint8, page-aligned.  It takes RAM only once it has been written to.

    Raises:
        MemoryError: the system refuses so much.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        size = count * nbytes
        try:
            if sys.platform == "win32":
                self._map = mmap.mmap(-1, max(size, 1))
            else:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
                self._map = mmap.mmap(-1, size + _HUGE, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(f"{size:,} bytes for experts were refused ({error})") from error
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._skip = -whole.data_ptr() % _HUGE if sys.platform != "win32" else 0
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.records = whole[self._skip : self._skip + size].view(count, nbytes)

    def give_back(self, rows: Iterable[int]) -> None:
        """Lets the system have the memory of these records: their content is lost, and they may be written again."""
        if _GIVE_BACK is None or sys.platform == "win32":
            return
        nbytes, page = self.records.shape[1], mmap.PAGESIZE
        for first, last in _runs(sorted(rows)):
            begin = -(-(self._skip + first * nbytes) // page) * page
            end = (self._skip + (last + 1) * nbytes) // page * page
            if end > begin:
                self._map.madvise(_GIVE_BACK, begin, end - begin)


def _runs(rows: list[int]) -> Iterator[tuple[int, int]]:
    """Sorted numbers -> (first, last) of those that follow one another: one call for many."""
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
