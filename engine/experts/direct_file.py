"""Files and ranges of them: positional reads and writes from many threads, past the page cache where that is allowed.

The page cache would hold a second copy of experts that are already in RAM, and evict pages that other programs need.
What begins on a page, in the file and in memory, is read past it; everything else goes through it and is dropped again.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.common.errors import EngineError, ErrorCode
from engine.common.footprint import RECORD_ALIGNMENT

if TYPE_CHECKING:
    import torch

_BINARY = getattr(os, "O_BINARY", 0)
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_WAIT: int = getattr(os, "RWF_NOWAIT", 0)


class DirectFile:
    """An open file."""

    def __init__(self, path: Path, *, writable: bool = False, direct: bool = True) -> None:
        flags = (os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY) | _BINARY
        self.path = path
        self._turn = threading.Lock()
        self._past_cache = direct
        self._buffered = os.open(path, flags, 0o644)
        self._direct = self._open_direct(flags) if direct and _O_DIRECT else None
        if sys.platform == "darwin" and direct:
            import fcntl

            with contextlib.suppress(OSError):
                fcntl.fcntl(self._buffered, fcntl.F_NOCACHE, 1)

    @property
    def is_direct(self) -> bool:
        return self._direct is not None

    @property
    def descriptor(self) -> int:
        return self._buffered

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills `target` from `offset`.  An I/O error is retried once, since some are transient."""
        done, failed, direct = 0, False, self._direct_for(offset, target)
        while done < len(target):
            try:
                count = self._read(self._buffered if direct is None else direct, offset + done, target[done:])
            except OSError as error:
                if direct is not None and error.errno == errno.EINVAL:
                    direct = None  # the file system accepts the flag but rejects the read: fall back to buffered I/O
                elif error.errno == errno.EIO and not failed:
                    failed = True
                else:
                    raise
                continue
            if count == 0:
                raise EOFError(f"{self.path} ends at byte {offset + done}")
            done += count
            if direct is not None and done % RECORD_ALIGNMENT:
                direct = None
        if direct is None:
            self.drop(offset, len(target))

    def read_at_random(self) -> None:
        """Says that small pieces are going to be read here and there, around which nothing is needed."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_RANDOM)

    def read_cached(self, offset: int, target: memoryview) -> int:
        """Copies what the page cache holds of these bytes, from the first one on; returns how many pages' bytes.

        0 where the system cannot tell.
        """
        if not _NO_WAIT:
            return 0
        done = 0
        try:
            while done < len(target) and (count := os.preadv(self._buffered, [target[done:]], offset + done, _NO_WAIT)):
                done += count
        except OSError:  # the next byte is not there, or the file system cannot tell
            pass
        return done if done == len(target) else done // RECORD_ALIGNMENT * RECORD_ALIGNMENT

    def write(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += self._write(self._buffered, offset + done, data[done:])
        self.drop(offset, len(data))  # the system begins to write it to the disk

    def sync(self) -> None:
        os.fsync(self._buffered)
        self.drop(0, 0)

    def drop(self, offset: int, nbytes: int) -> None:
        """Lets the page cache forget these bytes; 0 are all that follow."""
        if self._past_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._buffered, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for descriptor in (self._direct, self._buffered):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._direct, self._buffered = None, -1

    def _open_direct(self, flags: int) -> int | None:
        try:
            descriptor = os.open(self.path, flags | _O_DIRECT, 0o644)
        except OSError:
            return None
        # Some file systems accept the flag in `open` and reject the first read.
        with mmap.mmap(-1, RECORD_ALIGNMENT) as page:
            try:
                os.preadv(descriptor, [page], 0)
            except OSError:
                os.close(descriptor)
                return None
        return descriptor

    def _direct_for(self, offset: int, memory: memoryview) -> int | None:
        """The direct descriptor, if offset, size and address have the alignment it requires."""
        if self._direct is None or not len(memory):
            return None
        address = np.frombuffer(memory, np.uint8).ctypes.data
        return None if (offset | len(memory) | address) % RECORD_ALIGNMENT else self._direct

    if sys.platform == "win32":

        def _read(self, descriptor: int, offset: int, target: memoryview) -> int:
            with self._turn:  # no positional reads here, so seek and read must not interleave
                os.lseek(descriptor, offset, os.SEEK_SET)
                data = os.read(descriptor, min(len(target), 2**24))
            target[: len(data)] = data
            return len(data)

        def _write(self, descriptor: int, offset: int, data: memoryview) -> int:
            with self._turn:
                os.lseek(descriptor, offset, os.SEEK_SET)
                return os.write(descriptor, data[: 2**24])

    else:

        def _read(self, descriptor: int, offset: int, target: memoryview) -> int:
            return os.preadv(descriptor, [target], offset)

        def _write(self, descriptor: int, offset: int, data: memoryview) -> int:
            return os.pwritev(descriptor, [data], offset)


Place = tuple[Path, int]
"""A file, and where in it something begins."""


class OpenFiles:
    """Files that ranges are read from, opened with the first; safe to use from several threads."""

    def __init__(self, *, direct: bool) -> None:
        self._direct, self._files = direct, dict[Path, DirectFile]()

    @property
    def are_direct(self) -> bool:
        """Whether aligned reads of all of them bypass the page cache."""
        return all(file.is_direct for file in self._files.values())

    def open(self, path: Path) -> DirectFile:
        file = self._files.get(path)
        if file is None:
            try:
                file = self._files[path] = DirectFile(path, direct=self._direct)
            except OSError as error:
                raise unreadable(path, error) from error
        return file

    def read(self, path: Path, offset: int, target: memoryview) -> int:
        """Fills memory; returns its size."""
        try:
            self.open(path).read_into(offset, target)
        except (OSError, EOFError) as error:
            raise unreadable(path, error) from error
        return len(target)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [offset, offset + nbytes) of every record of a layer."""

    offset: int
    nbytes: int
    places: Sequence[Place] | memoryview


def unreadable(path: Path, error: OSError | EOFError) -> EngineError:
    why = error.strerror if isinstance(error, OSError) else "it is cut short, or has become shorter"
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"{path} cannot be read ({why or type(error).__name__}): check the disk, or download the model again.",
    )


def bytes_of(records: torch.Tensor) -> memoryview:
    """The bytes of contiguous records (uint8, on the CPU), as a writable view."""
    return memoryview(records.view(-1).numpy())  # type: ignore[arg-type]  # numpy is a buffer
