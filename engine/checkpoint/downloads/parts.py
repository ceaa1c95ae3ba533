"""The files of a download on their way, and the parts in which they are fetched.

The journal says which parts are on disk, with a checksum of each. It is a text file that only grows, a line an event,
each line with its own checksum. A line is written as soon as its part is, so a killed process loses only parts that
were under way. After a power cut a line may have outlived its part: whoever goes on compares the part's checksum before
it counts on it, and drops what follows a torn line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from engine.checkpoint.downloads.pace import Waits
from engine.checkpoint.downloads.records import PlannedFile
from engine.checkpoint.downloads.source import Source
from engine.common.untrusted import read_untrusted

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
        """Closes it, on the disk."""
        with contextlib.suppress(OSError):
            self.sync()
        os.close(self._descriptor)

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        os.fsync(self._descriptor)

    def of(self, file: int) -> FileRecord:
        """What is known of a file."""
        return self.files.setdefault(file, FileRecord())

    def begin(self, file: int, part_bytes: int) -> None:
        """The file is fetched from the start, in parts of this size; what was known of it is dropped."""
        self._write(f"begin {file} {part_bytes}")

    def pin(self, file: int, etag: str) -> None:
        """The server calls the content so."""
        self._write(f"etag {file} {etag.encode().hex()}")

    def part(self, file: int, part: int, digest: int) -> None:
        """A part is on disk."""
        self._write(f"part {file} {part} {digest:x}")

    def partial(self, file: int, part: int, got: int, digest: int) -> None:
        """The beginning of a part is on disk."""
        self._write(f"some {file} {part} {got} {digest:x}")

    def lost(self, file: int, part: int) -> None:
        """A part is not on disk as it should be."""
        self._write(f"lost {file} {part}")

    def search(self, file: int) -> None:
        """All parts are there and the whole is wrong: from here on parts are fetched a second time."""
        self._write(f"search {file}")

    def verified(self, file: int, sha256: str) -> None:
        """The whole file is right, and on the disk."""
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
        """Where a part begins and ends."""
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
