"""The result: the input's rows with their answers, written beside its place and then put there in one step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from engine.batch_files.answer import Answer
from engine.batch_files.aside import Between, on_and_on
from engine.batch_files.new_file import beside
from engine.batch_files.openai_responses import write_openai
from engine.batch_files.result_formats import CsvResult, JsonLinesResult, ParquetResult, SpreadsheetResult
from engine.batch_files.row import Row, RowSource
from engine.checkpoint.disk_errors import disk_errors_explained
from engine.errors import EngineError, ErrorCode


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


def check_output(path: Path, source: RowSource) -> None:
    """Refuses an output that could not be written, before anything is computed.

    Raises:
        EngineError: `INVALID_REQUEST`.
    """
    if path.suffix.lower() not in _FORMATS:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} is no kind of file that can be written: use {', '.join(s[1:] for s in _FORMATS)}.",
        )
    if path.is_dir() or not path.parent.is_dir():
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'its folder is not there'}.",
        )
    if not os.access(path.parent, os.W_OK):
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path.parent} cannot be written to: choose an output in another folder."
        )
    inside = source.path.is_dir() and source.path.resolve() in path.resolve().parents
    if inside or path.resolve() == source.path.resolve():
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"{path} is {'within ' if inside else ''}the input: choose another output."
        )


def write_result(
    path: Path,
    source: RowSource,
    answers: Iterable[Answer],
    *,
    openai: bool = False,
    created_s: int = 0,
    between: Between = on_and_on,
) -> int:
    """Writes all rows that have an answer, in the input's order, replacing what is there.

    Args:
        answers: in the order of their rows.
        openai: write OpenAI's batch output, and failures into the file that `errors_path` names.

        created_s: when the job began, which OpenAI's output says; seconds since 1970.

    Returns:
        How many rows were written.

    Raises:
        EngineError: `DISK_FULL`, `INVALID_REQUEST`; the old file is then as it was.
        StoppedError: see `Between`; the old file is as it was.
    """
    counted = _Counted(_answered(source, iter(answers), between))
    if openai:
        write_openai(path, counted, created_s)
    else:
        _replace(path, lambda new: _FORMATS[path.suffix.lower()].write(new, source, counted))
    return counted.count


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    with disk_errors_explained(path.parent):
        new = beside(path)
        try:
            write(new)
            with open(new, "rb+") as file:
                os.fsync(file.fileno())
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


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
