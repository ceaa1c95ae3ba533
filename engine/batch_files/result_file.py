"""The result file: the input's rows with their answers, written under a hidden name and renamed into place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.batch_files.answer import Answer
from engine.batch_files.background import Between, noop
from engine.batch_files.fingerprint import files_of
from engine.batch_files.openai_responses import errors_path, write_openai
from engine.batch_files.own_files import Ledger, NothingWritten, WrittenFile, absolute, is_there, put_in_place
from engine.batch_files.result_formats import (
    CsvResult,
    JsonLinesResult,
    ParquetResult,
    SpreadsheetResult,
    fits_a_sheet,
)
from engine.batch_files.row import Row, RowSource
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import NewFile, disk_errors_explained


class ResultFormat(Protocol):
    """Writes rows with their answers to a new file."""

    def write(self, path: Path, source: RowSource, answered: Iterator[tuple[Row, Answer]]) -> None: ...


_FORMATS: dict[str, ResultFormat] = {
    ".jsonl": JsonLinesResult(),
    ".csv": CsvResult(","),
    ".tsv": CsvResult("\t"),
    ".parquet": ParquetResult(),
    ".xlsx": SpreadsheetResult(),
}
OUTPUT_SUFFIXES = tuple(_FORMATS)
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of `write_result`.

    Attributes:
        rows: number of rows written, including failures.
        output: the file written: not the requested one, if a foreign file was in the way.
        asked: the requested file: a csv in place of an xlsx that is too small.
        errors: file of failed OpenAI requests; None if there are none.
    """

    rows: int
    output: Path
    asked: Path
    errors: Path | None = None


def check_output(path: Path, source: RowSource, *, openai: bool = False) -> None:
    """Checks that the output is writable before anything is computed.

    Args:
        openai: whether failures go to a separate file, which must not be part of the input either.

    Raises:
        EngineError: `INVALID_REQUEST`.
    """
    if path.suffix.lower() not in _FORMATS:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} has an unsupported file type: use {', '.join(s[1:] for s in _FORMATS)}.",
        )
    files = (path, errors_path(path)) if openai else (path,)
    for file in files:
        is_there(file)  # raises if the name is invalid
    if path.is_dir() or not path.parent.is_dir():
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'its folder does not exist'}.",
        )
    if not os.access(path.parent, os.W_OK):
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path.parent} cannot be written to: choose an output in another folder."
        )
    if source.path.is_dir() and any(_is_same(folder, source.path) for folder in path.resolve().parents):
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{path} is within the input: choose another output.")
    inputs = {number for file in files_of(source) if (number := _number(file)) is not None}
    for file in files:
        # Compare files, not names: links, and names that a file system treats as equal.
        if _number(file) in inputs or file.resolve() == source.path.resolve():
            what = "the input" if file == path else f"the input, where the failed rows of {path.name} would go"
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{file} is {what}: choose another output.")


def write_result(
    path: Path,
    source: RowSource,
    answers: Iterable[Answer],
    *,
    rows: int = 0,
    ledger: Ledger | None = None,
    openai: bool = False,
    created_s: int = 0,
    between: Between = noop,
) -> Written:
    """Writes all answered rows in input order, replacing an earlier result of the job.

    Args:
        answers: in row order.
        rows: upper limit of their number, if that may exceed the format's capacity.
        ledger: records what the job wrote; other files are left alone.
        openai: write OpenAI's batch output, with failures in the file of `errors_path`.
        created_s: when the job started, for OpenAI's output; seconds since 1970.

    Raises:
        EngineError: `DISK_FULL`, `INVALID_REQUEST`; the old file is unchanged.
        StoppedError: see `Between`; the old file is unchanged.
    """
    ledger = ledger or NothingWritten()
    counted = _Counted(_answered(source, iter(answers), between))
    failures = 0
    if path.suffix.lower() == ".xlsx" and not fits_a_sheet(source, rows):
        path = path.with_suffix(".csv")
    with disk_errors_explained(path.parent), ExitStack() as undo:
        new = undo.enter_context(NewFile(path))
        if openai:
            bad = undo.enter_context(NewFile(errors_path(path)))
            failures = write_openai(new.path, bad.path, counted, created_s)
            if failures:
                bad.finish()  # before either is renamed: if there is no room, neither is
        else:
            _FORMATS[path.suffix.lower()].write(new.path, source, counted)
        files = [put_in_place(new, path, "result", ledger)]
        if failures:
            files.append(put_in_place(bad, errors_path(path), "errors", ledger))
        _remove_old_errors(files, ledger)
        ledger.keep_only(files)
    places = [
        asked if file.path == absolute(asked) else Path(file.path)
        for file, asked in zip(files, (path, errors_path(path)), strict=False)
    ]
    return Written(counted.count, places[0], path, *places[1:])


def _remove_old_errors(files: Sequence[WrittenFile], ledger: Ledger) -> None:
    """Removes the job's own file of failures once there are none."""
    kept = {file.path for file in files}
    for old in ledger.written():
        if old.kind == "errors" and old.path not in kept and old.is_at(Path(old.path)):
            Path(old.path).unlink(missing_ok=True)


def _is_same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def _number(path: Path) -> tuple[int, int] | None:
    """A file's identity, independent of its names; None if it does not exist or has none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if status.st_ino else None


class _Counted:
    def __init__(self, pairs: Iterator[tuple[Row, Answer]]) -> None:
        self._pairs = pairs
        self.count = 0

    def __iter__(self) -> Iterator[tuple[Row, Answer]]:
        return self

    def __next__(self) -> tuple[Row, Answer]:
        pair = next(self._pairs)
        self.count += 1
        return pair


def _answered(source: RowSource, answers: Iterator[Answer], between: Between) -> Iterator[tuple[Row, Answer]]:
    answer = next(answers, None)
    for row in source.rows():
        if answer is None:
            return
        if row.index % _ROWS_AT_ONCE == 0:
            between(row.share)
        if answer.row == row.index:
            yield row, answer
            answer = next(answers, None)
