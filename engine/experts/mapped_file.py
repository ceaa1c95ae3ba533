"""A file of ours mapped into memory, where the page cache holds it in huge pages.  No torch here.

A disk that fails while it is read is an error with a name.  What the system has dropped from its cache since is read
again when it is needed, and if that fails the process ends: only files are mapped that nobody else writes to.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import sys
from pathlib import Path

from engine.experts.mapped_memory import HUGE

_POPULATE_READ = 22
"""Of `madvise`, on Linux since 5.14: reads these pages, and says if that failed."""
_TRIED = 8 * HUGE
_ENOUGH = 0.75
"""Of what is tried, in huge pages: with many small ones computing would be slower than with memory of our own."""


class MappedFile:
    """A private mapping: what is written to it does not reach the file.

    Attributes:
        memory: all of the file; only what `read` has read is sure to be there.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
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

    def huge_bytes(self) -> int:
        """Bytes of it that are there in huge pages."""
        found = re.search(
            rf"^{self._address:x}-.*?^FilePmdMapped: +(\d+) kB",
            Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace"),
            re.MULTILINE | re.DOTALL,
        )
        return int(found[1]) * 1024 if found is not None else 0


def map_file(descriptor: int, nbytes: int) -> MappedFile | None:
    """The open file mapped; None where it does not come in huge pages, or is too small to tell."""
    if sys.platform != "linux" or nbytes < 4 * _TRIED:
        return None
    try:
        mapped = MappedFile(descriptor, nbytes)
        # Not at its beginning: whoever has read its header has had the system read ahead, in small pages.
        mapped.read(nbytes // 2 // HUGE * HUGE, _TRIED)
        return mapped if mapped.huge_bytes() >= _ENOUGH * _TRIED else None
    except (OSError, ValueError):  # what is wrong with the file is told when it is read
        return None
