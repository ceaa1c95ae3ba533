"""Whether an input has changed since the job started, and how many rows it has.

Rows are counted if that is fast, otherwise extrapolated from the share read so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import xxhash

from engine.batch_files.job_watcher import Between, noop
from engine.batch_files.opening import FolderRows
from engine.batch_files.rows import RowSource
from engine.common.errors import EngineError, ErrorCode
from engine.common.untrusted import open_untrusted, reason

_BLOCK = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Stamp:
    """Cheap signs of a change: checked often; the hash is computed only if they differ."""

    signs: tuple[tuple[str, int, int], ...]


def files_of(source: RowSource) -> tuple[Path, ...]:
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
    return _digest(path, lambda _bytes: None)


def content_hash(source: RowSource, between: Between = noop) -> str:
    """A hash of all content and of the file names in a folder; reads everything once."""
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
    with open_untrusted(path, buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            on_read(len(block))
    return digest.hexdigest()


_COUNTED_BYTES = 100 * 10**6
_UNPACKED = (".csv", ".jsonl", ".md", ".tsv", ".txt")
_ROWS_AT_ONCE = 64
_TOLD_BY = 200


def counted_rows(source: RowSource, between: Between = noop) -> int | None:
    """The number of rows; None if the input is too big to count quickly."""
    if sum(size for _name, size, _time in stamp(source).signs) > _COUNTED_BYTES:
        return None
    count = 0
    for count, row in enumerate(source.rows(), start=1):
        if count % _ROWS_AT_ONCE == 1:
            between(row.share)
    return count


def has_rows(source: RowSource, rows: int) -> bool:
    """Whether there are at least `rows` rows; False if the input is too big to count quickly."""
    nbytes = sum(size for _name, size, _time in stamp(source).signs)
    # A line takes at least one byte, unless compressed.
    if nbytes > _COUNTED_BYTES or (nbytes < rows and source.path.suffix.lower() in _UNPACKED):
        return False
    return next(islice(source.rows(), rows - 1, None), None) is not None


class RowCount:
    """The number of rows, as far as known.

    Args:
        counted: see `counted_rows`.
    """

    def __init__(self, counted: int | None) -> None:
        self._total = counted
        self._exact = counted is not None

    @property
    def total(self) -> int | None:
        return self._total

    def read(self, rows: int, share: float) -> None:
        if not self._exact and share > 0 and rows >= _TOLD_BY:
            self._total = max(rows, round(rows / share))

    def ended(self, rows: int) -> None:
        """Notes the total at the end of the input."""
        self._total, self._exact = rows, True
