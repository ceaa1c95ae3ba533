"""Files that a job may replace: those that it wrote itself, unchanged since, and no others."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from engine.batch_files.fingerprint import file_digest
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import NewFile

_MOST_NAMES = 1000

WrittenKind = Literal["result", "errors", "replaceable"]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as a job left it, or may replace because somebody said so.

    Attributes:
        path: absolute.
        kind: `replaceable` was there before the job, and its user asked to have it replaced.
        size, time_ns: bytes and time of change; of the link, if it is one.
        digest: of what is in it; empty where nobody has read it.
    """

    path: str
    kind: WrittenKind
    size: int
    time_ns: int
    digest: str = ""

    @classmethod
    def as_it_is(cls, path: Path) -> WrittenFile:
        """What is at this path and may be replaced; what is in it is not read."""
        status = os.lstat(path)
        return cls(absolute(path), "replaceable", status.st_size, status.st_mtime_ns)

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is this one; a copy that was put back counts, for nothing is lost with it."""
        if self.path != absolute(path):
            return False
        try:
            status = os.lstat(path)
            if status.st_size != self.size:
                return False
            return status.st_mtime_ns == self.time_ns or (bool(self.digest) and file_digest(path) == self.digest)
        except OSError:
            return False


class Ledger(Protocol):
    """Remembers what a job wrote; `engine.batch_files.journal.Journal` is the real one."""

    def written(self) -> Sequence[WrittenFile]:
        """All that the job may replace."""

    def remember(self, file: WrittenFile) -> None:
        """Adds a file, before it takes its place: whoever is killed in between still knows it for their own."""

    def keep_only(self, files: Sequence[WrittenFile]) -> None:
        """Forgets all others."""


class NothingWritten:
    """For those who have written nothing, and remember nothing."""

    def written(self) -> Sequence[WrittenFile]:
        return ()

    def remember(self, file: WrittenFile) -> None:
        pass

    def keep_only(self, files: Sequence[WrittenFile]) -> None:
        pass


def absolute(path: Path) -> str:
    """One name for a file however it was given; a link at the end of it stays a link."""
    return str(path.parent.resolve() / path.name)


def is_there(path: Path) -> bool:
    """Whether something has this name: a file, a folder, or a link that may lead nowhere.

    Raises:
        EngineError: `INVALID_REQUEST`: nothing can have it, or nobody may look.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path} cannot be written ({why}): choose another output."
        ) from None
    return True


def is_own(path: Path, written: Sequence[WrittenFile]) -> bool:
    """Whether the file at `path` is one of those."""
    return any(file.is_at(path) for file in written)


def put_in_place(new: NewFile, path: Path, kind: WrittenKind, ledger: Ledger) -> WrittenFile:
    """Gives a file that has been written to its end its name, and remembers it.

    That is `path`, if nothing is there or only what the ledger knows; else `path` with a number: what others wrote
    meanwhile, or changed, is not touched.

    Raises:
        OSError, EngineError: it could not be done; what was there is as it was.
    """
    new.finish()
    status, digest = new.path.stat(), file_digest(new.path)
    for candidate in itertools.islice(_names(path), _MOST_NAMES):
        own = is_own(candidate, ledger.written())
        if not own and is_there(candidate):
            continue
        file = WrittenFile(absolute(candidate), kind, status.st_size, status.st_mtime_ns, digest)
        ledger.remember(file)
        try:
            if own:
                new.path.replace(candidate)
            else:
                new.take_free_name(candidate)
        except FileExistsError:
            continue
        except PermissionError:  # a program has it open, on Windows
            if not own:
                raise
            continue
        return file
    raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} and its next names are all taken: move some of them away.")


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")
