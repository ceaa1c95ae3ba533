"""Files that a job may replace: only those that it wrote itself and that are unchanged since."""

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
    """A file as a job left it, or one that the user allowed it to replace.

    Attributes:
        path: absolute.
        kind: `replaceable` existed before the job, and the user asked to replace it.
        size, time_ns: bytes and modification time; of the link itself, if it is one.
        digest: of its content; empty if unread.
    """

    path: str
    kind: WrittenKind
    size: int
    time_ns: int
    digest: str = ""

    @classmethod
    def as_it_is(cls, path: Path) -> WrittenFile:
        """The file at this path, which may be replaced; its content is not read."""
        status = os.lstat(path)
        return cls(absolute(path), "replaceable", status.st_size, status.st_mtime_ns)

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is this one; an identical copy counts, as replacing it loses nothing."""
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
    """Records what a job wrote; implemented by `engine.batch_files.journal.Journal`."""

    def written(self) -> Sequence[WrittenFile]:
        """All files that the job may replace."""

    def remember(self, file: WrittenFile) -> None:
        """Records a file before it is renamed into place, so that it is known even after a kill in between."""

    def keep_only(self, files: Sequence[WrittenFile]) -> None:
        """Removes all other records."""


class NothingWritten:
    """A ledger without records, which ignores new ones."""

    def written(self) -> Sequence[WrittenFile]:
        return ()

    def remember(self, file: WrittenFile) -> None:
        pass

    def keep_only(self, files: Sequence[WrittenFile]) -> None:
        pass


def absolute(path: Path) -> str:
    """The canonical path of a file; a link in its last component is not resolved."""
    return str(path.parent.resolve() / path.name)


def is_there(path: Path) -> bool:
    """Whether the name is taken: by a file, a folder, or a possibly dangling link.

    Raises:
        EngineError: `INVALID_REQUEST`: the name is invalid or its folder unreadable.
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
    """Whether the file at `path` is one of `written`."""
    return any(file.is_at(path) for file in written)


def put_in_place(new: NewFile, path: Path, kind: WrittenKind, ledger: Ledger) -> WrittenFile:
    """Renames a completely written file into place, and records it.

    That is `path`, if it is free or the ledger knows its file; otherwise `path` with a number: files that others wrote
    or changed are never touched.

    Raises:
        OSError, EngineError: it failed; the old file is unchanged.
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
    raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} and its numbered variants all exist: move some of them away.")


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")
