"""The journal of a download: which parts of its files are on disk, with a checksum of each.

A text file that only grows, a line an event, each line with its own checksum. A line is written as soon as its part is,
so a killed process loses only parts that were under way. After a power cut a line may have outlived its part: whoever
goes on compares the part's checksum before it counts on it, and drops what follows a torn line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from engine.common.foreign import read_foreign

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
        raw = read_foreign(path, _MAX_BYTES)
    except FileNotFoundError:
        return
    end = 0
    for line in raw.splitlines(keepends=True):
        text, _, checksum = line.decode("ascii", "replace").rstrip("\n").rpartition(" ")
        if not line.endswith(b"\n") or xxhash.xxh32_hexdigest(text.encode("ascii", "replace")) != checksum:
            return
        end += len(line)
        yield text, end
