"""The files of a download on their way, and the parts in which they are fetched.

The journal says which parts are on disk, with a checksum of each. It is a text file that only grows, a line an event,
each line with its own checksum. A line is written as soon as its part is, so a killed process loses only parts that
were under way. After a power cut a line may have outlived its part: whoever goes on compares the part's checksum before
it counts on it, and drops what follows a torn line.

Beside them is what else a transfer is made of: how fast, how many lines at once, and when again, and room on the disk
for a file before its bytes come. Each system has its own way to reserve a file's space without writing it. Where none
works (a network's file system, a compressed folder, another system), the file only gets its size, and the transfer
looks at the free space meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import random
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from engine.checkpoint.downloads.records import PlannedFile
from engine.checkpoint.downloads.source import Source
from engine.common.files import is_full
from engine.common.untrusted import read_untrusted

Clock = Callable[[], float]

FIRST_CONNECTIONS, MOST_CONNECTIONS = 8, 16
_STEP_S = 2.0
_WORTH_IT = 1.08
_SETTLED_S = 30.0
_LEAST_PER_CONNECTION = 128 * 1024
"""Bytes a second of a limit: more lines than that would each get too little to stay alive."""


class Meter:
    """The rate of the last seconds.  It falls to 0 when nothing arrives: there is no frozen speed."""

    SHORT_S, LONG_S = 6.0, 30.0
    _APART_S = 0.2

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._begun = clock()
        self._total = 0
        self._samples: deque[tuple[float, int]] = deque([(self._begun, 0)])

    def add(self, count: int) -> None:
        with self._lock:
            self._total += count

    def rate(self, window_s: float = SHORT_S) -> float:
        """Bytes per second over the last `window_s`, or since the beginning if that is shorter."""
        now = self._clock()
        with self._lock:
            if now - self._samples[-1][0] >= self._APART_S:
                self._samples.append((now, self._total))
            while len(self._samples) > 1 and now - self._samples[1][0] > self.LONG_S:
                self._samples.popleft()
            first = next((each for each in self._samples if now - each[0] <= window_s), (now, self._total))
            return (self._total - first[1]) / (now - first[0]) if now > first[0] else 0.0

    def eta_s(self, remaining: int) -> float | None:
        """Seconds until `remaining` bytes will have arrived; None while nothing arrives, or too little is known."""
        if remaining <= 0:
            return 0.0
        now_rate, rate = self.rate(), self.rate(self.LONG_S)
        if now_rate <= 0 or rate <= 0 or self._clock() - self._begun < 1.0:
            return None
        return remaining / rate

    @property
    def total(self) -> int:
        return self._total

    @property
    def seconds(self) -> float:
        return self._clock() - self._begun


class Limit:
    """A speed limit over all lines: who has received bytes waits until they were due."""

    _BURST_S = 0.05
    _LOOK_S = 0.1

    def __init__(self, clock: Clock = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock, self._sleep, self._lock = clock, sleep, threading.Lock()
        self.bytes_per_s = 0
        self._due = clock()

    def set(self, bytes_per_s: int) -> None:
        """0 for none; holds from the next bytes on."""
        with self._lock:
            if bytes_per_s != self.bytes_per_s:
                self.bytes_per_s, self._due = bytes_per_s, self._clock()

    def wait(self, count: int, stopped: Callable[[], bool]) -> None:
        """Waits until `count` more bytes were due, or `stopped`, or the limit is changed."""
        with self._lock:
            limit = self.bytes_per_s
            if not limit:
                return
            self._due = due = max(self._due, self._clock() - self._BURST_S) + count / limit
        while not stopped() and self.bytes_per_s == limit and (left := due - self._clock()) > 0:
            self._sleep(min(left, self._LOOK_S))


class Crew:
    """How many lines at once: more as long as that brings more, fewer when the server says so."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.wanted = FIRST_CONNECTIONS
        self._most = MOST_CONNECTIONS
        self._looked = clock()
        self._before: tuple[int, float] | None = None
        self._settled_until = 0.0

    def look(self, rate: float, limit_bytes_per_s: int = 0) -> int:
        """How many there should be, given what arrives now; to be asked often."""
        now = self._clock()
        if limit_bytes_per_s:
            return max(1, min(self.wanted, limit_bytes_per_s // _LEAST_PER_CONNECTION))
        if now - self._looked < _STEP_S or now < self._settled_until:
            return self.wanted
        self._looked = now
        if self._before is not None and rate < self._before[1] * _WORTH_IT:
            self.wanted, self._before, self._settled_until = self._before[0], None, now + _SETTLED_S
        elif self.wanted < self._most and rate > 0:
            self._before = self.wanted, rate
            self.wanted = min(self._most, self.wanted + max(2, self.wanted // 2))
        else:
            self._before = None
        return self.wanted

    def too_many(self) -> None:
        """The server has had enough: half of them, for as long as this runs."""
        self.wanted = self._most = max(1, self.wanted // 2)
        self._before, self._settled_until = None, self._clock() + _SETTLED_S


class Waits:
    """Growing waits with jitter between tries, endless; whatever arrives starts them over."""

    FIRST_S, LONGEST_S = 0.5, 60.0

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._tries = 0
        self.until = 0.0

    def failed(self, least_s: float = 0.0) -> None:
        """Wait, at least so long.  Failures of several lines at once count as one."""
        now = self._clock()
        if now >= self.until or least_s > self.until - now:
            grown = min(self.LONGEST_S, self.FIRST_S * 2 ** min(self._tries, 20))
            self.until = now + max(least_s, grown * random.uniform(0.5, 1.0))
            self._tries += 1

    def went_well(self) -> None:
        self._tries = 0

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - self._clock())


_MAX_BYTES = 256 * 2**20


@dataclass(slots=True)
class FileRecord:
    """What the journal knows of one file.

    Attributes:
        part_bytes: size of its parts but the last; 0 if nothing of it was begun.
        etag: pinned: what the server that has the content called it.
        digests: part -> checksum (xxh3 of 64 bits).
        partial: part -> (bytes that are there, their checksum): parts that a pause interrupted.
        verified: the SHA-256 that the whole file had when all of it was there; empty before.
        searched: parts that were fetched a second time, as the whole was wrong; None while it was not.
    """

    part_bytes: int = 0
    etag: str = ""
    digests: dict[int, int] = field(default_factory=dict)
    partial: dict[int, tuple[int, int]] = field(default_factory=dict)
    verified: str = ""
    searched: set[int] | None = None


class Journal:
    """The open journal; all methods may be called by any thread that holds the transfer's lock."""

    def __init__(self, path: Path) -> None:
        """Reads what is there and opens it for more.

        Raises:
            OSError: it cannot be read or written.
        """
        self.files: dict[int, FileRecord] = {}
        length = 0
        for line, end in _whole_lines(path):
            self._apply(line)
            length = end
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o600)
        os.ftruncate(self._descriptor, length)
        os.lseek(self._descriptor, 0, os.SEEK_END)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sync()
        os.close(self._descriptor)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def of(self, file: int) -> FileRecord:
        return self.files.setdefault(file, FileRecord())

    def begin(self, file: int, part_bytes: int) -> None:
        """The file is fetched from the start, in parts of this size; what was known of it is dropped."""
        self._write(f"begin {file} {part_bytes}")

    def pin(self, file: int, etag: str) -> None:
        self._write(f"etag {file} {etag.encode().hex()}")

    def part(self, file: int, part: int, digest: int) -> None:
        self._write(f"part {file} {part} {digest:x}")

    def partial(self, file: int, part: int, got: int, digest: int) -> None:
        self._write(f"some {file} {part} {got} {digest:x}")

    def lost(self, file: int, part: int) -> None:
        self._write(f"lost {file} {part}")

    def search(self, file: int) -> None:
        """All parts are there and the whole is wrong: from here on parts are fetched a second time."""
        self._write(f"search {file}")

    def verified(self, file: int, sha256: str) -> None:
        self._write(f"verified {file} {sha256}")

    def _write(self, line: str) -> None:
        raw = f"{line} {xxhash.xxh32_hexdigest(line.encode())}\n".encode()
        while raw:
            raw = raw[os.write(self._descriptor, raw) :]
        self._apply(line)

    def _apply(self, line: str) -> None:
        kind, number, *rest = line.split(" ")
        if kind == "begin":
            self.files[int(number)] = FileRecord(part_bytes=int(rest[0]))
            return
        record = self.of(int(number))
        if kind == "etag":
            record.etag = bytes.fromhex(rest[0]).decode() if rest[0] else ""
        elif kind == "part":
            record.digests[int(rest[0])] = int(rest[1], 16)
            record.partial.pop(int(rest[0]), None)
            if record.searched is not None:
                record.searched.add(int(rest[0]))
        elif kind == "some":
            record.partial[int(rest[0])] = int(rest[1]), int(rest[2], 16)
        elif kind == "lost":
            record.digests.pop(int(rest[0]), None)
            record.partial.pop(int(rest[0]), None)
        elif kind == "search":
            record.searched = set()
        elif kind == "verified":
            record.verified = rest[0]


def _whole_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Each line without its checksum, and where it ends; up to the first that is torn."""
    try:
        raw = read_untrusted(path, _MAX_BYTES)
    except FileNotFoundError:
        return
    end = 0
    for line in raw.splitlines(keepends=True):
        text, _, checksum = line.decode("ascii", "replace").rstrip("\n").rpartition(" ")
        if not line.endswith(b"\n") or xxhash.xxh32_hexdigest(text.encode("ascii", "replace")) != checksum:
            return
        end += len(line)
        yield text, end


PART_BYTES = 4 * 2**20
_LARGEST_PART_BYTES, _MANY_PARTS = 32 * 2**20, 1024
READ_BYTES = 2**20


class Stopped(Exception):  # noqa: N818 - people asked for it
    """This line ends here; its part stays as far as it came."""


@dataclass(eq=False, slots=True)
class File:
    """One file on its way.

    Attributes:
        unchecked: parts of an earlier run that nobody has compared with the disk yet.
        suspects: parts that did not arrive in one go: the first to look at if the whole is wrong.
        next_part, sha: how far the whole was hashed.
        is_whole: the server sends no ranges.
        fetched_again: its content changed under us once, with no checksum to go by.
        generation: counts how often it was begun; what was under way before counts no more.
    """

    number: int
    planned: PlannedFile
    path: Path
    source: Source
    record: FileRecord
    unchecked: set[int] = field(default_factory=set)
    suspects: set[int] = field(default_factory=set)
    next_part: int = 0
    sha: Any = field(default_factory=hashlib.sha256)
    is_dirty: bool = False
    is_whole: bool = False
    is_searched: bool = False
    is_reserved: bool = False
    fetched_again: bool = False
    generation: int = 0

    @property
    def parts(self) -> int:
        return -(-self.planned.size // self.record.part_bytes)

    def span(self, part: int) -> tuple[int, int]:
        start = part * self.record.part_bytes
        return start, min(start + self.record.part_bytes, self.planned.size)

    @property
    def have_bytes(self) -> int:
        """Of whole parts."""
        if self.record.verified:
            return self.planned.size
        last = self.parts - 1
        missing_of_last = self.parts * self.record.part_bytes - self.planned.size
        return len(self.record.digests) * self.record.part_bytes - (
            missing_of_last if last in self.record.digests else 0
        )


@dataclass(eq=False, slots=True)
class Job:
    """A part to fetch; part -1: the whole file in one go; part -2: the search for a wrong part.

    Attributes:
        got, digest: what of it is on disk, and its checksum so far.
        expected: of an interrupted part, to be compared first.
        line: which line fetches it.
        noted, noted_at: how much of it the journal knows of, and since when.
        wrong: wrong answers in a row.
    """

    file: File
    part: int
    generation: int
    waits: Waits
    got: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_64)
    expected: int | None = None
    line: int = 0
    noted: int = 0
    noted_at: float = field(default_factory=time.monotonic)
    wrong: int = 0


WHOLE, SEARCH = -1, -2


def part_bytes(size: int) -> int:
    """How large the parts of a file of this size are: not too many for a journal."""
    part = PART_BYTES
    while size > part * _MANY_PARTS and part < _LARGEST_PART_BYTES:
        part *= 2
    return part


_F_PREALLOCATE, _F_ALLOCATEALL, _F_PEOFPOSMODE = 42, 4, 3
"""Of macOS: <fcntl.h>."""
_END_OF_FILE_INFO = 6
_WINDOWS_FULL = (39, 112)
"""ERROR_HANDLE_DISK_FULL, ERROR_DISK_FULL."""


def allocated(path: Path) -> int:
    status = path.stat()
    return int(getattr(status, "st_blocks", -(-status.st_size // 512))) * 512


def reserve(path: Path, size: int) -> bool:
    """Gives a file its size, and where the file system can do it at once also its space; returns whether it did.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    with open(path, "r+b", buffering=0) as file:
        how = _WAYS.get(sys.platform)
        if how is not None and size:
            try:
                how(file, size)
            except OSError as error:
                if is_full(error):
                    raise
            else:
                return True
        if os.fstat(file.fileno()).st_size != size:
            file.truncate(size)
        return False


def _on_linux(file: FileIO, size: int) -> None:
    # Not os.posix_fallocate: where a file system cannot, that one writes into every block.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file.name))


def _on_macos(file: FileIO, size: int) -> None:
    """`F_PREALLOCATE` counts from where the file's space ends."""
    missing = size - allocated(Path(str(file.name)))
    if missing > 0:
        fcntl: Any = import_module("fcntl")
        fcntl.fcntl(file.fileno(), _F_PREALLOCATE, struct.pack("=Iiqqq", _F_ALLOCATEALL, _F_PEOFPOSMODE, 0, missing, 0))
    if os.fstat(file.fileno()).st_size != size:
        file.truncate(size)


def _on_windows(file: FileIO, size: int) -> None:
    """Moves the file's end, for which NTFS takes the space at once; `truncate` there writes zeros up to it."""
    if os.fstat(file.fileno()).st_size == size:
        return
    system: Any = ctypes
    kernel = system.WinDLL("kernel32", use_last_error=True)
    handle = ctypes.c_void_p(import_module("msvcrt").get_osfhandle(file.fileno()))
    end = ctypes.c_int64(size)
    if not kernel.SetFileInformationByHandle(handle, _END_OF_FILE_INFO, ctypes.byref(end), 8):
        code = int(system.get_last_error())
        number = errno.ENOSPC if code in _WINDOWS_FULL else errno.EIO
        raise OSError(number, f"the file's end cannot be moved (Windows error {code})", str(file.name))


_WAYS: dict[str, Callable[[FileIO, int], None]] = {"linux": _on_linux, "darwin": _on_macos, "win32": _on_windows}
