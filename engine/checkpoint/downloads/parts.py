"""The files of a download on their way, and the parts in which they are fetched."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from engine.checkpoint.downloads.journal import FileRecord
from engine.checkpoint.downloads.pace import Waits
from engine.checkpoint.downloads.records import PlannedFile
from engine.checkpoint.downloads.source import Source

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
