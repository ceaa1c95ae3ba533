"""A whole file in memory, read on threads.  No torch here: reading begins before that is imported.

On Linux, where its disk is built in, the file is mapped: what is cached is there at once, and everything else is read
without a copy.

Elsewhere it is copied into memory of our own: from the page cache what that holds, everything else past it. Through it,
each byte would take a page that is used once, and twice the processor's time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from engine.experts.direct_file import DirectFile
from engine.experts.mapped_file import map_file
from engine.experts.mapped_memory import map_in_huge_pages

_PIECE = 8 * 2**20
_READERS = 2
"""Reads in flight.  A fresh page costs as much time of a core as reading it: more readers slow the imports down that
they run beside, and gain nothing later."""
_AT_ONCE = threading.BoundedSemaphore(16)
"""Reads in flight of all files: a disk without a head to move takes as many."""
_LESS_URGENT = 10
"""Added to the readers' niceness: the imports take longer than reading does."""


class FileImage:
    """A file that is being read from its beginning; any thread may wait for a part of it.

    Raises:
        OSError: it cannot be opened.
        MemoryError: the system refuses memory of its size.

    Attributes:
        path: of the file.
        bytes: all of it, page-aligned; only what `wait_for` has waited for is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = DirectFile(path)
        try:
            self._status = os.fstat(self._file.descriptor)
            size = self._status.st_size
            self._mapped = map_file(path, self._file.descriptor, size)
            if self._mapped is not None:
                self.bytes = memoryview(self._mapped.memory)
            else:
                memory, skip = map_in_huge_pages(size)
                self.bytes = memoryview(memory)[skip : skip + size]
        except BaseException:
            self._file.close()
            raise
        self._begun, self._reading = 0, set[int]()  # where the next piece begins, and those under way
        self._changed = threading.Condition()
        self._failure: OSError | None = None
        self._threads = [
            threading.Thread(target=self._read, name="file-image", daemon=True)
            for _ in range(min(_READERS, -(-size // _PIECE)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that are used so far, about: of a mapped file all, see `count_as_used`."""
        if self._mapped is not None:
            return len(self.bytes)
        with self._changed:
            return self._complete

    def is_of(self, path: Path) -> bool:
        """Whether the file at this path still is the one that is read."""
        try:
            now = path.stat()
        except OSError:
            return False
        return _identity(now) == _identity(self._status)

    def wait_for(self, end: int, patience_s: float | None = None) -> bool:
        """Until everything before the byte `end` is there, or for so long; whether it is.

        Raises:
            OSError: the disk cannot read it, the file has become shorter, or the image was closed.
        """
        end = min(end, len(self.bytes))
        with self._changed:
            self._changed.wait_for(lambda: self._complete >= end or self._failure is not None, patience_s)
            if self._complete < end and self._failure is not None:
                raise self._failure
            return self._complete >= end

    def close(self) -> None:
        """Stops reading and closes the file.  Idempotent.  The memory lives as long as anything that refers to it."""
        self._fail(OSError(0, "it is no longer read"))
        for thread in self._threads:
            thread.join()
        self._file.close()

    def _read(self) -> None:
        if sys.platform == "linux":  # where this holds for a thread
            with contextlib.suppress(OSError):  # a sandbox may not let it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LESS_URGENT)
        while (begin := self._next()) is not None:
            try:
                with _AT_ONCE:
                    self._read_piece(begin, self.bytes[begin : begin + _PIECE])
            except EOFError:
                self._fail(OSError(0, "the file is cut short"))
            except OSError as error:
                self._fail(error)
            except Exception as error:  # nobody may wait for ever
                self._fail(OSError(0, f"reading it failed ({type(error).__name__})"))
            else:
                with self._changed:
                    self._reading.discard(begin)
                    self._changed.notify_all()

    def _read_piece(self, begin: int, target: memoryview) -> None:
        if self._mapped is not None:
            self._mapped.read(begin, len(target))
            return
        cached = self._file.read_cached(begin, target)
        if cached < len(target):
            self._file.read_into(begin + cached, target[cached:])

    @property
    def _complete(self) -> int:
        """Bytes from the beginning that are there."""
        return min(self._begun, *self._reading, len(self.bytes))

    def _next(self) -> int | None:
        with self._changed:
            begin = self._begun
            if self._failure is not None or begin >= len(self.bytes):
                return None
            self._reading.add(begin)
            self._begun += _PIECE
            return begin

    def _fail(self, failure: OSError) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
