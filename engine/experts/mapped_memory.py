"""Anonymous memory in huge pages, where there are any.  No torch here: it is mapped before that is imported."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

HUGE = 2 * 2**20
"""Bytes of a huge page, at a multiple of which the memory begins."""
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: do not reserve swap for address space that is not yet used."""


def map_in_huge_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory that is only used once it is written to, and how many of its bytes to skip so that huge pages fit.

    Raises:
        MemoryError: the system refuses the allocation.
    """
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, max(nbytes, 1)), 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        mapped = mmap.mmap(-1, nbytes + HUGE, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{nbytes:,} bytes for weights were refused ({error})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not supported by this kernel
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped, -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % HUGE
