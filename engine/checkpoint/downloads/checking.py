"""Whether the files of a download are right: the SHA-256 of each, and the search for the part that makes it wrong.

A file is hashed in order while its parts arrive, from what was just written; parts that an earlier run left are
compared with the journal on the way. Where the whole is not what the hub said, its parts come a second time, one by
one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from engine.checkpoint.downloads.pace import Waits
from engine.checkpoint.downloads.parts import READ_BYTES, SEARCH, File, Job, Journal, Stopped
from engine.common.errors import EngineError, ErrorCode

if TYPE_CHECKING:
    from engine.checkpoint.downloads.transfer import Transfer

_LOOK_S = 0.2


class Checker:
    """Of one transfer.  `run` is a thread of its own; `search` is called by the line that takes that job."""

    def __init__(self, files: Sequence[File], journal: Journal, fetching: Transfer) -> None:
        self._files, self._journal, self._fetching = files, journal, fetching
        self._changed = fetching.changed

    def run(self) -> None:
        """Hashes the files in order, as far as their parts are there, until all are verified or all is to end."""
        while True:
            with self._changed:
                file = None
                while (
                    not self._fetching.is_stopped
                    and (file := self._to_hash()) is None
                    and not self._fetching.is_complete
                ):
                    self._changed.wait(_LOOK_S)
                if file is None or self._fetching.is_stopped:
                    return
                part, generation = file.next_part, file.generation
            if part < file.parts:
                sha, digest = _read_part(file, part, file.sha.copy())
                self._hashed(file, part, generation, sha, digest)
            else:
                self._judge(file)

    def search(self, job: Job) -> None:
        """The whole is wrong: fetches part after part a second time, until the wrong one is found.

        The hub tells no checksums of parts. One that differs from what came first is the suspect; then all is hashed
        again. If all came twice and it is still wrong, that is the hub's copy.

        Raises:
            EngineError: `DOWNLOAD_FAILED`.
        """
        file = job.file
        done = file.record.searched if file.record.searched is not None else set()
        order = sorted(range(file.parts), key=lambda part: (part not in file.suspects, part))
        for part in (each for each in order if each not in done):
            before = file.record.digests.get(part)
            self._fetching.fetch(Job(file, part, job.generation, job.waits))
            if file.record.digests.get(part) != before and self._is_repaired(file):
                return
        if not self._is_repaired(file):
            with self._changed:
                self._fetching.begin_again(file)  # if people try again, then from the start
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
        with self._changed:
            if generation != file.generation or not self._fetching.is_open:
                return
            if part in file.unchecked and file.record.digests.get(part) != digest:
                self._journal.lost(file.number, part)
                self._fetching.put_first(Job(file, part, generation, Waits()))
            else:
                file.sha, file.next_part = sha, part + 1
            file.unchecked.discard(part)
            self._changed.notify_all()

    def _judge(self, file: File) -> None:
        """All of a file is there: is it right?"""
        sha256 = file.sha.hexdigest()
        if _is_right(file, sha256):
            with open(file.path, "r+b") as opened:
                os.fsync(opened.fileno())
            with self._changed:
                if self._fetching.is_open:
                    self._journal.verified(file.number, sha256)
                    self._journal.sync()
                self._changed.notify_all()
            return
        with self._changed:
            if not self._fetching.is_open:
                return
            if file.record.searched is None:
                self._journal.search(file.number)
            file.is_searched = True
            self._fetching.put_first(Job(file, SEARCH, file.generation, Waits()))
            self._changed.notify_all()

    def _is_repaired(self, file: File) -> bool:
        sha = hashlib.sha256()
        for part in range(file.parts):
            if self._fetching.is_stopped:
                raise Stopped
            _read_part(file, part, sha)
        if not _is_right(file, sha.hexdigest()):
            return False
        with self._changed:
            file.sha, file.next_part, file.is_searched = sha, file.parts, False
            self._changed.notify_all()
        return True


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
