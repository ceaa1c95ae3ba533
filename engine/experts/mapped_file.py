"""A file of weights mapped into memory.  No torch here.

A disk that fails while a file is read is an error with a name.  Later the system may drop pages of the file where
memory is short, and read them again when they are needed.  If the disk fails then, the process ends, and the next start
meets the error with a name.  So files are mapped on disks that nobody unplugs, and while there is memory to spare;
everything else is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from pathlib import Path

from engine.experts.mapped_memory import HUGE
from engine.hardware.disk import stays_connected
from engine.hardware.surroundings import available_ram, count_as_used

_POPULATE_READ = 22
"""Of `madvise`, on Linux since 5.14: reads these pages, and says if that failed."""
_TRIED = 8 * HUGE
_SPARE = 2 * 2**30
"""Bytes of RAM that must be free besides: what is mapped is the first that the system drops."""
_SAMPLES = 64
_WORTH_SAYING = 0.05
_PAGE = 4096

_MAPPED: dict[int, int] = {}
"""Address and size of each file that is mapped."""


class MappedFile:
    """A private mapping: what is written to it does not reach the file.  It counts as used RAM as long as it lives.

    Attributes:
        memory: all of the file; only what `read` has read is sure to be there.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        _begin_use(self._address, nbytes)
        weakref.finalize(self.memory, _end_use, self._address).atexit = False
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike Python's own, it lets others run meanwhile
        with contextlib.suppress(OSError):
            self.memory.madvise(mmap.MADV_HUGEPAGE)  # also: in huge pages from the disk

    def read(self, begin: int, nbytes: int) -> None:
        """Until these bytes, which begin with a page, are there.

        Raises:
            OSError: the disk cannot read them, the file has become shorter, or this system is too old.
        """
        if self._madvise(ctypes.c_void_p(self._address + begin), ctypes.c_size_t(nbytes), _POPULATE_READ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def map_file(path: Path, descriptor: int, nbytes: int) -> MappedFile | None:
    """The open file mapped; None where it is small, might go with its disk, or leaves too little memory to others.

    Small pages cost computing 0 to 4% against huge ones once they are there (measured, AVX-512, two threads).
    """
    if sys.platform != "linux" or nbytes < 4 * _TRIED or not stays_connected(path):
        return None
    if nbytes + _SPARE > available_ram():
        return None
    try:
        mapped = MappedFile(descriptor, nbytes)
        mapped.read(nbytes // 2 // HUGE * HUGE, _TRIED)  # whether this system can
        return mapped
    except (OSError, ValueError):  # what is wrong with the file is told when it is read
        return None


def dropped_note() -> str:
    """A sentence for people if the system has dropped more than a little of the mapped files; takes 0.1 ms."""
    files = list(_MAPPED.items())
    if not files:
        return ""
    mincore, there = ctypes.CDLL(None).mincore, ctypes.c_ubyte()
    gone = 0.0
    for address, nbytes in files:
        apart = max(nbytes // _SAMPLES // _PAGE, 1) * _PAGE
        places = range(address, address + nbytes, apart)
        missing = 0
        for place in places:
            failed = mincore(ctypes.c_void_p(place), ctypes.c_size_t(_PAGE), ctypes.byref(there))
            missing += not failed and not there.value & 1
        gone += nbytes * missing / len(places)
    share = gone / sum(nbytes for _, nbytes in files)
    if share < _WORTH_SAYING:
        return ""
    return (
        f"Other programs have pushed {share:.0%} of the weights out of memory. They are read from the disk again as "
        "they are needed, which slows answers down meanwhile: if it lasts, close other programs."
    )


def _begin_use(address: int, nbytes: int) -> None:
    _MAPPED[address] = nbytes
    count_as_used(nbytes)


def _end_use(address: int) -> None:
    count_as_used(-_MAPPED.pop(address, 0))
