"""A whole file in memory, read on threads.  No torch here: reading begins before that is imported.

On Linux, where its disk is built in, the file is mapped: what is cached is there at once, and everything else is read
without a copy.

Elsewhere it is copied into memory of our own: from the page cache what that holds, everything else past it. Through it,
each byte would take a page that is used once, and twice the processor's time.

Which files a model takes is known once its headers are read and its memory is planned, and all that takes torch.  So
each start notes what it has read or kept, and the next one that is asked for the same begins with that while Python
still imports the engine.  A wrong guess costs nothing but the reading: what nobody takes is given back.

A disk that fails while a file is read is an error with a name.  Later the system may drop pages of a mapped file where
memory is short, and read them again when they are needed.  If the disk fails then, or somebody has cut the file short,
the process ends with a sentence that names it.  So files are mapped on disks that stay plugged in, and while there is
memory to spare; everything else is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from engine.checkpoint.library import where
from engine.checkpoint.names import resolve
from engine.common.errors import EngineError
from engine.common.files import write_private
from engine.common.paths import cache_dir
from engine.common.untrusted import parse_json, read_untrusted
from engine.experts.direct_file import DirectFile
from engine.hardware.disk import stays_connected
from engine.hardware.surroundings import available_ram, count_as_used

HUGE = 2 * 2**20
"""Bytes of a huge page, at a multiple of which the memory begins."""
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: do not reserve swap for address space that is not yet used."""


def map_in_huge_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory that is only used once it is written to, and how many of its bytes to skip so that huge pages fit."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, max(nbytes, 1)), 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        mapped = mmap.mmap(-1, nbytes + HUGE, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{nbytes:,} bytes for weights were refused ({error})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not supported by this kernel
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped, -ctypes.addressof(ctypes.c_char.from_buffer(mapped)) % HUGE


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


_WHAT_TO_DO = "Switchyard had to end: put the whole file back, then start again."


class MappedFile:
    """A private mapping of an open file: what is written to it does not reach the file.

    Args:
        is_held: whether all of it is to stay in memory; then it counts as used RAM as long as it lives.
    """

    def __init__(self, file: DirectFile, *, is_held: bool = True) -> None:
        self.file, descriptor = file, file.descriptor
        self.nbytes = nbytes = os.fstat(descriptor).st_size
        if sys.platform == "win32":  # where what may be written to counts as memory that is in use
            self.memory = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ)
        else:
            flags = mmap.MAP_PRIVATE | NO_RESERVE  # a file may be larger than all memory
            self.memory = mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._pages = np.frombuffer(self.memory, np.uint8)[::_PAGE]
        self._address = self._pages.ctypes.data
        self._is_watched = False
        if is_held:
            _begin_use(self._address, nbytes)
            weakref.finalize(self.memory, _end_use, self._address).atexit = False
        if sys.platform == "linux":
            self._madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike Python's own, it lets others run
            with contextlib.suppress(OSError):
                self.memory.madvise(mmap.MADV_HUGEPAGE)  # also: in huge pages from the disk

    def watch(self) -> None:
        """From now on whoever reads what the file has lost ends with a sentence.  Idempotent.  Imports torch."""
        if not self._is_watched:
            from engine.kernels.native.library import watch_file

            sentence = f"{self.file.path} became shorter, or its disk failed, while it was in use. {_WHAT_TO_DO}"
            weakref.finalize(self.memory, watch_file(self._address, self.nbytes, sentence)).atexit = False
            self._is_watched = True

    def read(self, begin: int, nbytes: int) -> None:
        """Until these bytes, which begin with a page, are there."""
        if self._madvise(ctypes.c_void_p(self._address + begin), ctypes.c_size_t(nbytes), _POPULATE_READ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def bring(self, begin: int, nbytes: int) -> None:
        """As `read`, on any system: where that cannot say that a disk has failed, it ends the process."""
        if sys.platform == "linux":
            try:
                self.read(begin, nbytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            else:
                return
        self._pages[begin // _PAGE : -(-(begin + nbytes) // _PAGE)].max()

    def check(self) -> None:
        """Raises `EOFError`: the file has become shorter, and what is beyond its end cannot be read any more."""
        if os.fstat(self.file.descriptor).st_size < self.nbytes:
            raise EOFError

    def leave(self, begin: int, end: int) -> None:
        """Lets the system have the memory of these pages, and what the page cache has of them, which are read again
        when they are needed."""
        if hasattr(self.memory, "madvise"):
            self.memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        begin, end = begin // HUGE * HUGE, -(-end // HUGE) * HUGE  # a large page goes as a whole or not at all
        self.file.drop(begin, end - begin)


def map_file(file: DirectFile) -> MappedFile | None:
    """The open file mapped; None where it is small, might go with its disk, or leaves too little memory to others.

    Small pages cost computing 0 to 4% against huge ones once they are there (measured, AVX-512, two threads).
    """
    nbytes = os.fstat(file.descriptor).st_size
    if sys.platform != "linux" or nbytes < 4 * _TRIED or not stays_connected(file.path):
        return None
    if nbytes + _SPARE > available_ram():
        return None
    try:
        mapped = MappedFile(file)
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


_PIECE = 8 * 2**20
_READERS = 2
"""Reads in flight.  A fresh page costs as much time of a core as reading it: more readers slow the imports down that
they run beside, and gain nothing later."""
_AT_ONCE = threading.BoundedSemaphore(16)
"""Reads in flight of all files: a disk without a head to move takes as many."""
_LESS_URGENT = 10
"""Added to the readers' niceness: the imports take longer than reading does."""


class FileImage:
    """A file that is being read from its beginning; any thread may wait for a part of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = DirectFile(path)
        try:
            self._status = os.fstat(self._file.descriptor)
            size = self._status.st_size
            self._mapped = map_file(self._file)
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

    def watch(self) -> None:
        if self._mapped is not None:
            self._mapped.watch()

    def wait_for(self, end: int, patience_s: float | None = None) -> bool:
        """Until everything before the byte `end` is there, or for so long; whether it is."""
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


_LEFT_FREE = 2**30
"""Bytes of RAM that must be free besides: nothing has been planned yet."""
_MOST_BYTES = 2**16
_log = logging.getLogger(__name__)


class EarlyReads:
    """What a process reads before its engine is there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_begun = False
        self._starting: threading.Thread | None = None
        self._images: dict[Path, FileImage] = {}

    def begin(self, model: str, asked: str) -> bool:
        """Begins to read what the last start with these settings has read, on threads.  Once: a process that has its
        engine has other things in RAM and to do."""
        with self._lock:
            if self._has_begun:
                return False
            self._has_begun = True
            self._starting = threading.Thread(target=self._begin, args=(model, asked), name="early-reads", daemon=True)
            self._starting.start()
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that they take, which whoever plans memory need not find again."""
        self._started()
        with self._lock:
            return sum(image.nbytes for image in self._images.values())

    def take(self, path: Path) -> FileImage:
        """The image of this file, begun early or now; the caller closes it."""
        self._started()
        with self._lock:
            image = self._images.pop(path, None)
        if image is not None:
            if image.is_of(path):
                return image
            image.close()
        return FileImage(path)

    def drop(self) -> None:
        self._started()
        with self._lock:
            images, self._images = list(self._images.values()), {}
        for image in images:
            image.close()

    def _started(self) -> None:
        with self._lock:
            starting, self._starting = self._starting, None
        if starting is not None:
            starting.join()

    def _begin(self, model: str, asked: str) -> None:
        for path in remembered(model, asked):
            try:
                if path.stat().st_size + _LEFT_FREE > available_ram():
                    break
                image = FileImage(path)
            except (OSError, MemoryError) as error:
                _log.info("%s is not read early: %s", path, error)
                continue
            self._images[path] = image


EARLY_READS = EarlyReads()
"""Of this process."""


def remember(model: str, asked: str, files: Iterable[Path]) -> None:
    """Notes what the next start that is asked for this model and these settings can read; never fails."""
    with contextlib.suppress(OSError, EngineError, ValueError):
        note = _note_of(model)
        record = json.dumps({"asked": asked, "files": [str(file) for file in files]})
        if not note.exists() or note.read_text(encoding="utf-8") != record:
            write_private(note, record)


def remembered(model: str, asked: str) -> list[Path]:
    """The files of the last start that was asked for the same, those that are there."""
    try:
        found = parse_json(read_untrusted(_note_of(model), _MOST_BYTES))
        files = [Path(file) for file in found["files"]] if found["asked"] == asked else []
        return [file for file in files if file.is_file()]
    except (OSError, EngineError, ValueError, LookupError, TypeError):
        return []


def _note_of(model: str) -> Path:
    return cache_dir() / "starts" / f"{where(Path(resolve(model)))}.json"
