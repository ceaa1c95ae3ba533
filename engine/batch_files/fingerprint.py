"""Detects whether an input has changed since the job started."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from engine.batch_files.background import Between, noop
from engine.batch_files.folder import FolderRows
from engine.batch_files.row import RowSource
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import open_foreign, reason

_BLOCK = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Stamp:
    """Cheap signs of a change: checked often; the hash is computed only if they differ."""

    signs: tuple[tuple[str, int, int], ...]


def files_of(source: RowSource) -> tuple[Path, ...]:
    """The files of an input."""
    return source.files if isinstance(source, FolderRows) else (source.path,)


def stamp(source: RowSource) -> Stamp:
    """Size and modification time of every file; (-1, -1) for a missing one."""
    signs = []
    for path in files_of(source):
        try:
            status = path.stat()
            signs.append((str(path), status.st_size, status.st_mtime_ns))
        except OSError:
            signs.append((str(path), -1, -1))
    return Stamp(tuple(signs))


def file_digest(path: Path) -> str:
    """A hash of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    return _digest(path, lambda _bytes: None)


def content_hash(source: RowSource, between: Between = noop) -> str:
    """A hash of all content and of the file names in a folder; reads everything once.

    Raises:
        EngineError: `INVALID_REQUEST`, if a file cannot be read.
        StoppedError: see `Between`.
    """
    whole = hashlib.sha256()
    total = max(1, sum(size for _name, size, _time in stamp(source).signs))
    done = 0

    def tell(read: int) -> None:
        nonlocal done
        done += read
        between(min(1.0, done / total))

    for path in files_of(source):
        try:
            digest = _digest(path, tell)
        except OSError as error:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"{path} cannot be read ({reason(error)}): check that it still exists."
            ) from None
        # The input may move between two runs, but names within a folder must not change.
        name = path.relative_to(source.path).as_posix() if path != source.path else ""
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.hexdigest()


def _digest(path: Path, on_read: Callable[[int], None]) -> str:
    digest = xxhash.xxh3_128()
    with open_foreign(path, buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()
