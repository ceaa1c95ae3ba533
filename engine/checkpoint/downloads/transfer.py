"""Fetches the files of a download in parts, over several lines at once.

Every part is a range request of its own, so whatever breaks costs at most one part; what of it had arrived stays while
this process lives, and over an orderly stop. Connection threads write parts where they belong and note them in the
journal. One thread follows and checks what was written. A last one sees to it that the disk has it all.

A file is hashed in order while its parts arrive, from what was just written; parts that an earlier run left are
compared with the journal on the way. Where the whole is not what the hub said, its parts come a second time, one by
one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from engine.checkpoint.downloads import source as sources
from engine.checkpoint.downloads.parts import (
    READ_BYTES,
    SEARCH,
    WHOLE,
    Crew,
    File,
    Job,
    Journal,
    Limit,
    Meter,
    Stopped,
    Waits,
    allocated,
    part_bytes,
    reserve,
)
from engine.checkpoint.downloads.records import Plan, PlannedFile
from engine.checkpoint.downloads.source import (
    Client,
    ContentChanged,
    LineBroken,
    NetworkAway,
    RangeRefused,
    ServerBusy,
    Source,
    Stream,
    Trouble,
)
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space

_MOST_WRONG = 6
"""Wrong answers in a row for one part, before the server is given up."""
_LEAST_IN_A_STALL = 8 * 1024
_SILENT_S = 3.0
_NOTE_S, _NOTE_BYTES = 5.0, 256 * 1024
"""On a slow line, what has come of a part is noted after so long, if it is worth it."""
_SYNC_S, _SPACE_S, _RENEW_S = 2.0, 2.0, 5.0
_LEAST_FREE_BYTES = 20 * 10**6
_JOIN_S = 2.0
_LOOK_S = 0.2


@dataclass(eq=False, slots=True)
class _Watch:
    """A stream under way: aborted from outside if it stalls or all is to stop."""

    stream: Stream
    since: float
    got: int = 0


class Transfer:
    """All files of a download.  `start`, then `tend` often until `is_over`, then `stop` in any case.

    Attributes:
        error: why it cannot go on without people; None while it can.
        meter: what arrives.
        limit: may be set at any time.
    """

    def __init__(self, plan: Plan, journal: Journal, client: Client) -> None:
        self._plan, self._journal, self._client = plan, journal, client
        self._folder = plan.work
        self.changed = threading.Condition()
        self._ready: deque[Job] = deque()
        self._later: list[Job] = []
        self._active: set[Job] = set()
        self._watches: set[_Watch] = set()
        self._threads: dict[int, threading.Thread] = {}
        self._helpers: list[threading.Thread] = []
        self._files: list[File] = []
        self._stopping = False
        self.is_open = True  # the journal; a thread that did not end in time writes no more
        self._crew = Crew()
        self._network = Waits()
        self._trouble: Trouble | None = None
        self._arrived_at = self._renewed_at = self._space_at = time.monotonic()
        self.connections = 0
        self.error: EngineError | None = None
        self.meter, self.limit = Meter(), Limit()

    # From outside

    def start(self) -> None:
        """Makes room on the disk and begins.

        Raises:
            EngineError: `DISK_FULL`, `INVALID_REQUEST` (the folder cannot be written).
        """
        with disk_errors_explained(self._folder):
            self._files += [self._opened(number, planned) for number, planned in enumerate(self._plan.files)]
            missing = sum(max(0, file.planned.size - allocated(file.path)) for file in self._files)
            if missing:
                require_space(self._folder, missing)
            for file in self._files:
                file.is_reserved = reserve(file.path, file.planned.size)
        self._ready.extend(job for file in self._files for job in self._jobs_of(file))
        for name, work in (("hash", self._hash), ("sync", self._sync)):
            self._helpers.append(
                threading.Thread(target=self._guarded, args=(work,), name=f"download-{name}", daemon=True)
            )
        for thread in self._helpers:
            thread.start()
        self.tend()

    def tend(self) -> None:
        wanted = self._crew.look(self.meter.rate(3.0), self.limit.bytes_per_s)
        now = time.monotonic()
        with self.changed:
            self.connections = wanted
            outstanding = len(self._ready) + len(self._later) + len(self._active)
            for index in range(min(wanted, outstanding)) if not self.is_stopped else ():
                if index not in self._threads or not self._threads[index].is_alive():
                    work = threading.Thread(target=self._guarded, args=(lambda n=index: self._work(n),), daemon=True)
                    work.name = f"download-{index}"
                    self._threads[index] = work
                    work.start()
            stalled = [watch for watch in self._watches if now - watch.since > sources.STALL_S]
            for watch in stalled:
                dripped, watch.got, watch.since = watch.got < _LEAST_IN_A_STALL, 0, now
                if dripped and not self.limit.bytes_per_s:
                    watch.stream.abort()
        if now - self._space_at > _SPACE_S and not all(file.is_reserved for file in self._files):
            self._space_at = now
            with contextlib.suppress(OSError):
                if (
                    self.done_bytes < self._plan.total_bytes
                    and shutil.disk_usage(self._folder).free < _LEAST_FREE_BYTES
                ):
                    self._fail(_full(self._folder))

    def wait(self, seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.is_over, seconds)

    @property
    def is_over(self) -> bool:
        """Whether all is there, or nothing goes on."""
        return self.error is not None or self.is_complete

    @property
    def is_complete(self) -> bool:
        return all(file.record.verified for file in self._files)

    @property
    def done_bytes(self) -> int:
        with self.changed:
            jobs = [job.got for jobs in (self._ready, self._later, self._active) for job in jobs if job.part >= 0]
            return sum(file.have_bytes for file in self._files) + sum(jobs)

    @property
    def trouble(self) -> Trouble | None:
        """What it waits for, if nothing arrives."""
        silent = time.monotonic() - self._arrived_at > _SILENT_S
        return self._trouble if silent or self._network.left_s > 1 else None

    def stop(self) -> None:
        """Ends all threads and notes what was under way, so that the next run goes on in the middle of a part."""
        with self.changed:
            self._stopping = True
            for watch in self._watches:
                watch.stream.abort()
            self.changed.notify_all()
        deadline = time.monotonic() + _JOIN_S
        for thread in (*self._threads.values(), *self._helpers):
            thread.join(max(0.0, deadline - time.monotonic()))
        with self.changed, contextlib.suppress(OSError):
            for job in (*self._ready, *self._later, *self._active):
                if job.part >= 0 and job.got and job.expected is None and job.generation == job.file.generation:
                    self._journal.partial(job.file.number, job.part, job.got, job.digest.intdigest())
            self.is_open = False

    # Beginning

    def _opened(self, number: int, planned: PlannedFile) -> File:
        path = self._folder / planned.place
        path.parent.mkdir(parents=True, exist_ok=True)
        record = self._journal.of(number)
        try:
            is_there = path.stat().st_size == planned.size
        except FileNotFoundError:
            is_there = False
        if not is_there or not record.part_bytes:
            path.unlink(missing_ok=True)
            path.touch()
            self._journal.begin(number, part_bytes(planned.size))
            record = self._journal.of(number)
        file = File(number, planned, path, Source(self._plan, planned, self._client, record.etag), record)
        file.unchecked = set(record.digests)
        return file

    def _jobs_of(self, file: File) -> Iterator[Job]:
        for part in range(file.parts) if not file.record.verified else ():
            if part not in file.record.digests:
                got, expected = file.record.partial.get(part, (0, None))
                yield Job(file, part, file.generation, Waits(), got, expected=expected)

    # Connections

    @property
    def is_stopped(self) -> bool:
        return self._stopping or self.error is not None

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs a thread's work; its end by a mistake of ours is the end of all, and is told."""
        try:
            with disk_errors_explained(self._folder):
                work()
        except EngineError as error:
            self._fail(error)
        except Exception as error:
            if self._stopping:  # its line was closed under it
                return
            self._fail(EngineError(ErrorCode.INTERNAL, f"The download stopped by a mistake of ours ({error!r})."))
            raise

    def _fail(self, error: EngineError) -> None:
        with self.changed:
            self.error = self.error or error
            for watch in self._watches:
                watch.stream.abort()
            self.changed.notify_all()

    def _work(self, index: int) -> None:
        while (job := self._take(index)) is not None:
            try:
                with disk_errors_explained(self._folder):
                    if job.part == WHOLE:
                        self._fetch_whole(job)
                    elif job.part == SEARCH:
                        self._search(job)
                    else:
                        self._fetch(job)
            except Trouble as trouble:
                self._again(job, trouble)
            except Stopped:
                with self.changed:
                    self._active.discard(job)
                    self._ready.appendleft(job)
                return
            else:
                with self.changed:
                    self._active.discard(job)
                    self.changed.notify_all()

    def _take(self, index: int) -> Job | None:
        """The next part, when its time has come; None if this line is not needed any more."""
        with self.changed:
            while not self.is_stopped and index < self.connections and (self._ready or self._later or self._active):
                if not self._network.left_s:
                    job = next((each for each in self._later if not each.waits.left_s), None)
                    if job is not None:
                        self._later.remove(job)
                    elif self._ready:
                        job = self._ready.popleft()
                    if job is not None and job.generation == job.file.generation:
                        job.line = index
                        self._active.add(job)
                        return job
                    if job is not None:
                        continue
                self.changed.wait(_LOOK_S)
            return None

    def _fetch(self, job: Job) -> None:
        file = job.file
        start, end = file.span(job.part)
        with open(file.path, "r+b", buffering=0) as out:
            self._check_begun(job, out, start)
            while start + job.got < end:
                out.seek(start + job.got)
                before = job.got
                with file.source.open(start + job.got, end) as stream, self._watched(stream) as watch:
                    for chunk in stream.chunks:
                        if self.is_stopped or job.generation != file.generation:
                            raise Stopped
                        _write(out, chunk)
                        job.digest.update(chunk)
                        job.got += len(chunk)
                        job.wrong = 0
                        job.waits.went_well()
                        self._note(job)
                        self._arrived(len(chunk), watch)
                        if self.limit.bytes_per_s and job.line >= self.connections:
                            raise Stopped  # fewer lines since the limit was lowered: another goes on with this part
                if job.got == before:
                    raise LineBroken("The server sends nothing: trying again.")
        self._keep(job)

    def _check_begun(self, job: Job, out: FileIO, start: int) -> None:
        """Counts on what an earlier run left of a part only if it is what that run wrote."""
        if job.expected is None:
            return
        out.seek(start)
        left = job.got
        digest = xxhash.xxh3_64()
        while left and (chunk := out.read(min(left, READ_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        with self.changed:
            if digest.intdigest() == job.expected:
                job.digest = digest
            else:
                job.got, job.digest = 0, xxhash.xxh3_64()
            job.expected = None

    @contextlib.contextmanager
    def _watched(self, stream: Stream) -> Iterator[_Watch]:
        watch = _Watch(stream, time.monotonic())
        with self.changed:
            if self.is_stopped:
                raise Stopped
            self._watches.add(watch)
        try:
            yield watch
        finally:
            with self.changed:
                self._watches.discard(watch)

    def _arrived(self, count: int, watch: _Watch) -> None:
        self.meter.add(count)
        self._arrived_at = time.monotonic()
        self._network.went_well()
        watch.got += count
        if self.limit.bytes_per_s:
            self.limit.wait(count, lambda: self.is_stopped)
            watch.since = time.monotonic()

    def _note(self, job: Job) -> None:
        """Notes what has come of a part that takes long, so that a kill costs no more than what came since."""
        if job.got - job.noted >= _NOTE_BYTES and time.monotonic() - job.noted_at >= _NOTE_S:
            with self.changed:
                if job.generation == job.file.generation and self.is_open:
                    self._journal.partial(job.file.number, job.part, job.got, job.digest.intdigest())
                    job.file.is_dirty = True
            job.noted, job.noted_at = job.got, time.monotonic()

    def _keep(self, job: Job) -> None:
        with self.changed:
            if job.generation == job.file.generation and self.is_open:
                if job.file.source.etag != job.file.record.etag:
                    self._journal.pin(job.file.number, job.file.source.etag)
                self._journal.part(job.file.number, job.part, job.digest.intdigest())
                job.file.is_dirty = True
                job.got = 0  # counted with the file's parts from here on

    def _fetch_whole(self, job: Job) -> None:
        """Reads the file from its beginning, where a server does nothing else; parts that are there already pass by."""
        file, part, got, digest = job.file, 0, 0, xxhash.xxh3_64()
        with (
            open(file.path, "r+b", buffering=0) as out,
            file.source.open_whole() as stream,
            self._watched(stream) as watch,
        ):
            for chunk in stream.chunks:
                view = memoryview(chunk)
                while view:
                    if self.is_stopped or job.generation != file.generation:
                        raise Stopped
                    start, end = file.span(part)
                    piece = view[: end - start - got]
                    view = view[len(piece) :]
                    if part not in file.record.digests:
                        out.seek(start + got)
                        _write(out, piece)
                    digest.update(piece)
                    got += len(piece)
                    if start + got == end:
                        if part not in file.record.digests:
                            done = Job(file, part, job.generation, job.waits, digest=digest)
                            self._keep(done)
                            job.wrong = 0
                            job.waits.went_well()
                        part, got, digest = part + 1, 0, xxhash.xxh3_64()
                self._arrived(len(chunk), watch)
        if part < file.parts:
            raise LineBroken("The server ended a file early: trying again.")

    # When it does not work

    def _again(self, job: Job, trouble: Trouble) -> None:
        with self.changed:
            self._active.discard(job)
            if job.generation != job.file.generation:
                return
            if self.is_stopped:  # its line was cut to end it: what it has is noted by whoever stops all
                self._ready.append(job)
                return
            self._trouble = trouble
            job.file.suspects.add(job.part)
            self._later.append(job)
            match trouble:
                case NetworkAway():
                    job.file.source.forget_address()  # of a second host, which the hub may replace
                    self._network.failed()
                    self._renew()
                case LineBroken():
                    job.waits.failed()
                    self._renew()
                case ServerBusy(too_many=True):
                    self._crew.too_many()
                    self._network.failed(trouble.wait_s)
                case ServerBusy():
                    job.waits.failed(trouble.wait_s)
                case RangeRefused():
                    self._without_ranges(job)
                case ContentChanged():
                    job.waits.failed()
                    self._with_other_content(job)
                case _:
                    job.waits.failed()
                    job.file.source.forget_address()
                    self._wrong(job, trouble)
            self.changed.notify_all()

    def _wrong(self, job: Job, trouble: Trouble) -> None:
        job.wrong += 1
        if job.wrong >= _MOST_WRONG:
            self._fail(EngineError(ErrorCode.DOWNLOAD_FAILED, f"{trouble.message} Try again later, or another hub."))

    def _renew(self) -> None:
        now = time.monotonic()
        if now - self._arrived_at > _RENEW_S and now - self._renewed_at > _RENEW_S:
            self._renewed_at = now
            self._client.renew()

    def _without_ranges(self, job: Job) -> None:
        file = job.file
        if file.source.xet is not None:
            file.source.streams_xet = True
        elif not file.is_whole:
            file.is_whole = True
            self._drop_jobs(file)
            self._later.append(Job(file, WHOLE, file.generation, job.waits))
        else:
            self._later.remove(job)

    def _drop_jobs(self, file: File) -> None:
        self._ready = deque(each for each in self._ready if each.file is not file)
        self._later = [each for each in self._later if each.file is not file]

    def _with_other_content(self, job: Job) -> None:
        """The ETag is another one.  The checksum of the whole tells whether that matters; without one, fetch it all."""
        file = job.file
        self._wrong(job, ContentChanged(f"{file.planned.path} changes while it is fetched."))
        file.source.etag = ""
        if file.source.content:
            return
        if file.fetched_again:
            message = f"{file.planned.path} changes on the hub while it is fetched: try again later."
            self._fail(EngineError(ErrorCode.DOWNLOAD_FAILED, message))
        file.fetched_again = True
        self._begin_again(file)

    def _begin_again(self, file: File) -> None:
        """Drops all that is there of a file.  The caller holds `changed`."""
        self._journal.begin(file.number, file.record.part_bytes)
        file.record = self._journal.of(file.number)
        file.generation += 1
        file.next_part, file.sha, file.unchecked = 0, hashlib.sha256(), set()
        self._drop_jobs(file)
        self._ready.extend(self._jobs_of(file))

    # Whether it is right

    def _hash(self) -> None:
        """Hashes the files in order, as far as their parts are there, until all are verified or all is to end."""
        while True:
            with self.changed:
                file = None
                while not self.is_stopped and (file := self._to_hash()) is None and not self.is_complete:
                    self.changed.wait(_LOOK_S)
                if file is None or self.is_stopped:
                    return
                part, generation = file.next_part, file.generation
            if part < file.parts:
                sha, digest = _read_part(file, part, file.sha.copy())
                self._hashed(file, part, generation, sha, digest)
            else:
                self._judge(file)

    def _search(self, job: Job) -> None:
        """The whole is wrong: fetches part after part a second time, until the wrong one is found.

        The hub tells no checksums of parts. One that differs from what came first is the suspect; then all is hashed
        again. If all came twice and it is still wrong, that is the hub's copy.
        """
        file = job.file
        done = file.record.searched if file.record.searched is not None else set()
        order = sorted(range(file.parts), key=lambda part: (part not in file.suspects, part))
        for part in (each for each in order if each not in done):
            before = file.record.digests.get(part)
            self._fetch(Job(file, part, job.generation, job.waits))
            if file.record.digests.get(part) != before and self._is_repaired(file):
                return
        if not self._is_repaired(file):
            with self.changed:
                self._begin_again(file)  # if people try again, then from the start
            other = "use another mirror" if file.planned.url else "choose another repository"
            raise EngineError(
                ErrorCode.DOWNLOAD_FAILED,
                f"{file.planned.path} arrived with a wrong checksum twice: the server's copy or a proxy on the way is "
                f"damaged; try again later, or {other}.",
            )

    def _to_hash(self) -> File | None:
        for file in self._files:
            has_next = file.next_part == file.parts or file.next_part in file.record.digests
            if has_next and not file.record.verified and not file.is_searched:
                return file
        return None

    def _hashed(self, file: File, part: int, generation: int, sha: Any, digest: int) -> None:
        with self.changed:
            if generation != file.generation or not self.is_open:
                return
            if part in file.unchecked and file.record.digests.get(part) != digest:
                self._journal.lost(file.number, part)
                self._ready.appendleft(Job(file, part, generation, Waits()))
            else:
                file.sha, file.next_part = sha, part + 1
            file.unchecked.discard(part)
            self.changed.notify_all()

    def _judge(self, file: File) -> None:
        sha256 = file.sha.hexdigest()
        if _is_right(file, sha256):
            with open(file.path, "r+b") as opened:
                os.fsync(opened.fileno())
            with self.changed:
                if self.is_open:
                    self._journal.verified(file.number, sha256)
                    self._journal.sync()
                self.changed.notify_all()
            return
        with self.changed:
            if not self.is_open:
                return
            if file.record.searched is None:
                self._journal.search(file.number)
            file.is_searched = True
            self._ready.appendleft(Job(file, SEARCH, file.generation, Waits()))
            self.changed.notify_all()

    def _is_repaired(self, file: File) -> bool:
        sha = hashlib.sha256()
        for part in range(file.parts):
            if self.is_stopped:
                raise Stopped
            _read_part(file, part, sha)
        if not _is_right(file, sha.hexdigest()):
            return False
        with self.changed:
            file.sha, file.next_part, file.is_searched = sha, file.parts, False
            self.changed.notify_all()
        return True

    # The disk

    def _sync(self) -> None:
        """Has the disk write what arrived, from time to time: a power cut then costs seconds."""
        while True:
            with self.changed:
                if self.changed.wait_for(lambda: self.is_stopped or self.is_complete, _SYNC_S):
                    return
                dirty = [file for file in self._files if file.is_dirty]
                for file in dirty:
                    file.is_dirty = False
            for file in dirty:
                with open(file.path, "r+b") as opened:
                    os.fsync(opened.fileno())
            with self.changed:
                if dirty and self.is_open:
                    self._journal.sync()


def _write(out: FileIO, data: bytes | memoryview) -> None:
    written = out.write(data)
    while written < len(data):
        written += out.write(memoryview(data)[written:])


def _full(folder: Path) -> EngineError:
    return EngineError(
        ErrorCode.DISK_FULL,
        f"The disk of {folder.parent} is full: make room and let the download go on; nothing is lost.",
    )


def _read_part(file: File, part: int, sha: Any) -> tuple[Any, int]:
    """The hash of all up to a part's end, and the part's own checksum if it is to be compared."""
    start, end = file.span(part)
    digest = xxhash.xxh3_64()
    with open(file.path, "rb", buffering=0) as reader:
        reader.seek(start)
        while start < end and (chunk := reader.read(min(READ_BYTES, end - start))):
            sha.update(chunk)
            if part in file.unchecked:
                digest.update(chunk)
            start += len(chunk)
    return sha, digest.intdigest()


def _is_right(file: File, sha256: str) -> bool:
    """Whether a file is what the hub said of it; true where it said nothing."""
    kind, _, expected = file.source.content.partition(":")
    if kind == "git":
        blob = hashlib.sha1(f"blob {file.planned.size}\0".encode(), usedforsecurity=False)
        with open(file.path, "rb", buffering=0) as reader:
            while chunk := reader.read(READ_BYTES):
                blob.update(chunk)
        return blob.hexdigest() == expected
    return not expected or sha256 == expected
