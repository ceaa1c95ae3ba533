"""What is checked of a download, the room that it takes, and how fast it may be."""

import ctypes
import errno
import hashlib
import itertools
import os
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from engine.checkpoint.downloads import parts as space
from engine.checkpoint.downloads.parts import (
    FIRST_CONNECTIONS,
    MOST_CONNECTIONS,
    SEARCH,
    Crew,
    File,
    Job,
    Journal,
    Limit,
    Meter,
    Stopped,
    Waits,
)
from engine.checkpoint.downloads.records import PlannedFile
from engine.checkpoint.downloads.transfer import Transfer
from engine.common.errors import ErrorCode
from tests.refusals import refused

PART = 100
CONTENT = bytes(range(256)) + b"end of the file"


class FromMemory(Transfer):
    """Brings the parts of `content`; a line that takes jobs is a loop in `work`."""

    def __init__(self, folder: Path, content: bytes = CONTENT, told: str | None = None) -> None:
        self.content, self.fetched, self.is_ended = content, list[int](), False
        plan: Any = SimpleNamespace(work=folder)
        super().__init__(plan, Journal(folder / "journal"), SimpleNamespace())  # type: ignore[arg-type]
        path = folder / "file"
        path.write_bytes(bytes(len(content)))
        self._journal.begin(0, PART)
        told = f"sha256:{hashlib.sha256(content).hexdigest()}" if told is None else told
        source: Any = SimpleNamespace(content=told)
        self.file = File(0, PlannedFile("file", "file", len(content), ""), path, source, self._journal.of(0))
        self._files.append(self.file)

    @property
    def is_stopped(self) -> bool:
        return self.is_ended or bool(self._ready)  # the checker's thread is this test's own: it must come back

    def _fetch(self, job: Job) -> None:
        self.fetched.append(job.part)
        self.write(job.part, self.content)

    def write(self, part: int, content: bytes, noted: bytes | None = None) -> None:
        """A part is on disk, and noted: as it is, or with the checksum of other bytes."""
        start, end = self.file.span(part)
        with self.file.path.open("r+b") as out:
            out.seek(start)
            out.write(content[start:end])
        self._journal.part(0, part, xxhash.xxh3_64_intdigest(content[start:end] if noted is None else noted))

    def write_all(self, content: bytes) -> None:
        for part in range(self.file.parts):
            self.write(part, content)

    def run(self) -> None:
        """The checker, and the line that does what it asks for, until nothing is left to do."""
        while not self.is_complete:
            self._hash()
            if not self._ready:
                return
            job = self._ready.popleft()
            if job.part == SEARCH:
                self._search(job)
            else:
                self._fetch(job)


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
    memory._journal.search(0)
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
    memory.is_ended = True
    memory._hash()
    with pytest.raises(Stopped):
        memory._is_repaired(memory.file)
    memory.write_all(CONTENT[:-1] + b"?")
    memory.is_open = False
    memory._judge(memory.file)
    assert not memory._ready  # the journal is closed: nothing is begun any more


SIZE = 3 * 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"begun")
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux does it")
def test_on_linux_it_is_taken_at_once(file: Path) -> None:
    if space.reserve(file, SIZE):  # a file system may be unable to
        assert space.allocated(file) >= SIZE
    assert file.stat().st_size == SIZE
    assert file.read_bytes()[:6] == b"begun\0"


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_a_file_of_no_bytes_needs_none(file: Path, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert not space.reserve(file, 0)
    assert file.stat().st_size == 0


def test_another_system_gets_the_size_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd14")
    assert not space.reserve(file, SIZE)
    assert file.stat().st_size == SIZE


class MacOs:
    """`fcntl` as macOS has it."""

    def __init__(self, error: int = 0) -> None:
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self._error = error

    def fcntl(self, _descriptor: int, command: int, argument: bytes) -> bytes:
        self.asked.append((command, struct.unpack("=Iiqqq", argument)))
        if self._error:
            raise OSError(self._error, "no")
        return argument


@pytest.mark.parametrize(("error", "reserved"), [(0, True), (errno.ENOTSUP, False)])
def test_macos_is_asked_for_what_is_missing(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: int, reserved: bool
) -> None:
    system = MacOs(error)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(space, "import_module", lambda _name: system)
    monkeypatch.setattr(space, "allocated", lambda _path: 2**20)
    assert space.reserve(file, SIZE) is reserved
    assert system.asked == [(42, (4, 3, 0, 2 * 2**20, 0))]
    assert file.stat().st_size == SIZE


def test_a_full_disk_of_macos_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(space, "import_module", lambda _name: MacOs(errno.ENOSPC))
    with pytest.raises(OSError, match="no"):
        space.reserve(file, SIZE)


class Windows:
    """What of Windows is asked: it moves a file's end."""

    def __init__(self, path: Path, code: int = 0) -> None:
        self.moved: list[tuple[int, int]] = []
        self._path, self._code = path, code

    def load(self, name: str, *, use_last_error: bool) -> Any:
        assert (name, use_last_error) == ("kernel32", True)
        return SimpleNamespace(SetFileInformationByHandle=self._set)

    def _set(self, _handle: Any, kind: int, end: Any, _size: int) -> int:
        self.moved.append((kind, end._obj.value))
        if not self._code:
            with self._path.open("r+b") as file:
                file.truncate(end._obj.value)
        return int(not self._code)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "win32")
        monkeypatch.setattr(ctypes, "WinDLL", self.load, raising=False)
        monkeypatch.setattr(ctypes, "get_last_error", lambda: self._code, raising=False)
        handles = SimpleNamespace(get_osfhandle=lambda descriptor: descriptor)
        monkeypatch.setattr(space, "import_module", lambda _name: handles)


@pytest.mark.parametrize(("code", "reserved"), [(0, True), (50, False)])
def test_windows_moves_the_files_end(file: Path, monkeypatch: pytest.MonkeyPatch, code: int, reserved: bool) -> None:
    system = Windows(file, code)
    system.use(monkeypatch)
    assert space.reserve(file, SIZE) is reserved
    assert system.moved == [(6, SIZE)]
    assert file.stat().st_size == SIZE
    assert space.reserve(file, SIZE)  # it has its size already: nothing is asked
    assert len(system.moved) == 1


@pytest.mark.parametrize("code", [39, 112])
def test_a_full_disk_of_windows_is_said(file: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    Windows(file, code).use(monkeypatch)
    with pytest.raises(OSError, match="Windows error") as caught:
        space.reserve(file, SIZE)
    assert caught.value.errno == errno.ENOSPC
    assert file.stat().st_size == len(b"begun")


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


def test_the_rate_is_that_of_the_last_seconds_and_falls_to_nothing(time: Time) -> None:
    meter = Meter(time)
    assert meter.eta_s(1000) is None
    for _ in range(40):
        time.now += 0.25
        meter.add(250)
        meter.rate()
    assert meter.rate() == pytest.approx(1000, rel=0.1)
    assert meter.eta_s(30_000) == pytest.approx(30, rel=0.1)
    rates = []
    for _ in range(30):
        time.now += 0.25
        rates.append(meter.rate())
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0
    assert meter.eta_s(30_000) is None
    assert meter.eta_s(0) == 0


def test_a_limit_is_kept_to_whatever_the_lines_do(time: Time) -> None:
    limit = Limit(time, time.sleep)
    limit.set(1000)
    begun = time.now
    for _ in range(100):
        limit.wait(100, lambda: False)
    assert time.now - begun == pytest.approx(10, rel=0.02)
    time.now += 1000  # time in which nothing came is not saved up
    begun = time.now
    for _ in range(100):
        limit.wait(100, lambda: False)
    assert time.now - begun == pytest.approx(10, rel=0.02)


def test_a_limit_can_be_lifted_while_somebody_waits(time: Time) -> None:
    limit = Limit(time, lambda seconds: (time.sleep(seconds), limit.set(0))[0])
    limit.set(1)
    begun = time.now
    limit.wait(1000, lambda: False)
    assert time.now - begun < 1
    limit.set(1)
    stopped = time.now
    limit.wait(1000, lambda: True)
    assert time.now == stopped


def looked(crew: Crew, time: Time, rate_of: dict[str, float], steps: int) -> int:
    for _ in range(steps):
        time.now += 2.1
        crew.look(min(crew.wanted * rate_of["each"], rate_of["all"]))
    return crew.wanted


def test_more_lines_as_long_as_they_bring_more(time: Time) -> None:
    assert looked(Crew(time), time, {"each": 10.0, "all": 1e9}, 8) == MOST_CONNECTIONS
    assert looked(Crew(time), time, {"each": 10.0, "all": 30.0}, 8) == FIRST_CONNECTIONS
    assert Crew(time).look(1e9, limit_bytes_per_s=50_000) == 1


def test_a_server_that_has_enough_gets_fewer(time: Time) -> None:
    crew = Crew(time)
    looked(crew, time, {"each": 10.0, "all": 1e9}, 8)
    crew.too_many()
    assert crew.wanted == MOST_CONNECTIONS // 2
    assert looked(crew, time, {"each": 10.0, "all": 1e9}, 100) == MOST_CONNECTIONS // 2
    for _ in range(9):
        crew.too_many()
    assert crew.wanted == 1


def test_waits_grow_with_jitter_and_start_over(time: Time) -> None:
    waits, lengths = Waits(time), []
    for _ in range(20):
        waits.failed()
        waits.failed()  # another line, at the same moment
        lengths.append(waits.left_s)
        time.now = waits.until
    assert lengths[0] <= Waits.FIRST_S
    assert Waits.LONGEST_S / 2 <= lengths[-1] <= Waits.LONGEST_S
    assert all(later > earlier / 2 for earlier, later in itertools.pairwise(lengths))
    waits.went_well()
    waits.failed()
    assert waits.left_s <= Waits.FIRST_S
    waits.failed(least_s=300)
    assert waits.left_s > 299


def test_a_journal_survives_being_torn_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.begin(0, 100)
    journal.pin(0, '"é 1"')
    journal.part(0, 3, 0xABC)
    journal.partial(0, 4, 50, 0xDEF)
    journal.part(0, 5, 0x123)
    journal.lost(0, 3)
    journal.search(0)
    journal.part(0, 5, 0x456)
    journal.begin(1, 10)
    journal.verified(1, "aa")
    journal.close()
    whole = path.read_bytes()
    read = Journal(path)
    read.close()
    record = read.of(0)
    assert (record.part_bytes, record.etag, record.digests) == (100, '"é 1"', {5: 0x456})
    assert (record.partial, record.searched, read.of(1).verified) == ({4: (50, 0xDEF)}, {5}, "aa")
    lines = whole.splitlines(keepends=True)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        torn = Journal(path)
        torn.part(2, 0, 1)
        torn.close()
        intact = sum(1 for n in range(len(lines)) if len(b"".join(lines[: n + 1])) <= cut)
        assert path.read_bytes().startswith(b"".join(lines[:intact]))
        again = Journal(path)
        again.close()
        assert again.of(2).digests == {0: 1}
    path.write_bytes(whole.replace(b"part 0 5", b"part 0 6", 1))
    flipped = Journal(path)
    flipped.close()
    assert 5 not in flipped.of(0).digests
