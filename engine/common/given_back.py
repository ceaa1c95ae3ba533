"""Memory that was written to, and is of no use for now, back to the system."""

from __future__ import annotations

import ctypes
import mmap
import sys


def give_back(address: int, nbytes: int) -> None:
    """Returns the whole pages of the system between these addresses, whose content is lost; Linux alone takes them.

    Args:
        address: of anonymous memory of this process, which stays its own and can be written to again.
    """
    if sys.platform != "linux":
        return
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        # What the system refuses stays where it is.
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
