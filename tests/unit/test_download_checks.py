"""Whether what a download wrote is right, without a network: the parts come from memory."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from engine.checkpoint.downloads.checking import Checker
from engine.checkpoint.downloads.pace import Waits
from engine.checkpoint.downloads.parts import SEARCH, File, Job, Journal, Stopped
from engine.checkpoint.downloads.records import PlannedFile
from engine.common.errors import ErrorCode
from tests.refusals import refused

PART = 100
CONTENT = bytes(range(256)) + b"end of the file"


class FromMemory:
    """Brings the parts of `content`; a line that takes jobs is a loop in `work`."""

    def __init__(self, folder: Path, content: bytes = CONTENT, told: str | None = None) -> None:
        self.changed, self.is_open, self.is_stopped = threading.Condition(), True, False
        self.content, self.jobs, self.fetched = content, deque[Job](), list[int]()
        self.journal = Journal(folder / "journal")
        path = folder / "file"
        path.write_bytes(bytes(len(content)))
        self.journal.begin(0, PART)
        told = f"sha256:{hashlib.sha256(content).hexdigest()}" if told is None else told
        source: Any = SimpleNamespace(content=told)
        self.file = File(0, PlannedFile("file", "file", len(content), ""), path, source, self.journal.of(0))
        self.checker = Checker([self.file], self.journal, self)

    @property
    def is_complete(self) -> bool:
        return bool(self.file.record.verified)

    def put_first(self, job: Job) -> None:
        self.jobs.append(job)
        self.is_stopped = True  # the checker's thread is this test's own: it must come back

    def begin_again(self, file: File) -> None:
        self.journal.begin(0, PART)
        file.record, file.next_part, file.sha, file.unchecked = self.journal.of(0), 0, hashlib.sha256(), set()

    def fetch(self, job: Job) -> None:
        self.fetched.append(job.part)
        self.write(job.part, self.content)

    def write(self, part: int, content: bytes, noted: bytes | None = None) -> None:
        """A part is on disk, and noted: as it is, or with the checksum of other bytes."""
        start, end = self.file.span(part)
        with self.file.path.open("r+b") as out:
            out.seek(start)
            out.write(content[start:end])
        self.journal.part(0, part, xxhash.xxh3_64_intdigest(content[start:end] if noted is None else noted))

    def write_all(self, content: bytes) -> None:
        for part in range(self.file.parts):
            self.write(part, content)

    def run(self) -> None:
        """The checker, and the line that does what it asks for, until nothing is left to do."""
        while not self.is_complete:
            self.checker.run()
            if not self.jobs:
                return
            self.is_stopped = False
            job = self.jobs.popleft()
            if job.part == SEARCH:
                self.checker.search(job)
            else:
                self.fetch(job)


@pytest.fixture
def memory(tmp_path: Path) -> FromMemory:
    return FromMemory(tmp_path)


def test_a_file_that_is_right_is_verified_without_another_byte(memory: FromMemory) -> None:
    memory.write_all(CONTENT)
    memory.run()
    assert memory.file.record.verified == hashlib.sha256(CONTENT).hexdigest()
    assert memory.fetched == []


def test_parts_of_an_earlier_run_are_compared_with_the_journal(memory: FromMemory) -> None:
    memory.write_all(CONTENT)
    memory.file.unchecked = {0, 1, 2}
    start, _ = memory.file.span(1)
    with memory.file.path.open("r+b") as out:  # which a power cut has left so
        out.seek(start)
        out.write(bytes(PART))
    memory.run()
    assert memory.is_complete
    assert memory.fetched == [1]
    assert memory.file.path.read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_wrong_part_is_found_and_the_first_suspects_come_first(memory: FromMemory, wrong: int) -> None:
    start, _ = memory.file.span(wrong)
    memory.write_all(CONTENT[:start] + b"?" + CONTENT[start + 1 :])
    memory.file.suspects = {wrong}
    memory.run()
    assert memory.is_complete
    assert memory.fetched == [wrong]
    assert memory.file.path.read_bytes() == CONTENT


def test_a_search_that_a_kill_ended_goes_on_where_it_was(memory: FromMemory) -> None:
    memory.write_all(CONTENT[:-1] + b"?")
    memory.journal.search(0)
    memory.write(0, CONTENT)
    memory.run()
    assert memory.is_complete
    assert memory.fetched == [1, 2]


def test_what_is_wrong_twice_is_said_and_begins_again(tmp_path: Path) -> None:
    memory = FromMemory(tmp_path, told="sha256:" + "0" * 64)
    memory.write_all(CONTENT)
    with refused(ErrorCode.DOWNLOAD_FAILED, "wrong checksum twice"):
        memory.run()
    assert sorted(memory.fetched) == [0, 1, 2]
    assert memory.file.record.digests == {}


@pytest.mark.parametrize("content", [CONTENT, b""])
def test_small_files_have_the_checksum_of_git(tmp_path: Path, content: bytes) -> None:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    memory = FromMemory(tmp_path, content, told=f"git:{blob}")
    memory.write_all(content)
    memory.run()
    assert memory.is_complete


def test_without_a_checksum_what_came_counts(tmp_path: Path) -> None:
    memory = FromMemory(tmp_path, told="")
    memory.write_all(b"x" * len(CONTENT))
    memory.run()
    assert memory.is_complete


def test_it_ends_when_all_is_to_end(memory: FromMemory) -> None:
    memory.is_stopped = True
    memory.checker.run()
    with pytest.raises(Stopped):
        memory.checker._is_repaired(memory.file)
    memory.write_all(CONTENT[:-1] + b"?")
    memory.is_stopped, memory.is_open = False, False
    memory.checker._judge(memory.file)
    assert not memory.jobs  # the journal is closed: nothing is begun any more
    job = Job(memory.file, 0, 0, Waits())
    assert job.got == 0
