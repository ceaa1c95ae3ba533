"""The result file: the input's rows with their answers, written under a hidden name and renamed into place.

Each format is a function that writes rows: csv, jsonl, Parquet, xlsx.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from engine.batch_files.job_watcher import Between, noop
from engine.batch_files.journal import Journal, NothingWritten, WrittenFile, absolute, is_there, put_in_place
from engine.batch_files.openai_format import errors_path, write_openai
from engine.batch_files.opening import files_of, has_rows
from engine.batch_files.prompts import as_text, json_value
from engine.batch_files.rows import Answer, ResultColumns, Row, RowSource, result_columns
from engine.batch_files.tables import ParquetRows
from engine.common.config import HERE
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import NewFile, disk_errors_explained
from engine.common.plain_text import plain

Answered = Iterator[tuple[Row, Answer]]
_ROWS_AT_ONCE = 512
_MOST_SHEET_ROWS = 1_048_576
_MOST_SHEET_COLUMNS = 16_384
MOST_OF_A_SHEET = f"An xlsx sheet holds at most {_MOST_SHEET_ROWS:,} rows and {_MOST_SHEET_COLUMNS:,} columns"
_MOST_CELL_CHARACTERS = 32_767
_MOST_EXACT = 10**15
"""Sheet numbers are floating point: longer integers, such as account numbers, would lose digits."""
_FIRST_YEAR = 1900
_NOT_IN_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_LOOKS_ESCAPED = re.compile("_(?=x[0-9A-Fa-f]{4}_)")
"""Spreadsheet programs would show the character of this number."""
_FORMULA = re.compile("[\t\r\n ]*[=+\\-@\t\r\uff1d\uff0b\uff0d\uff20]")
"""What makes a spreadsheet program compute a cell of a csv; some take the wide forms, too."""
_NUMBER = re.compile("[+-]?[0-9][0-9.,\u00a0\u202f]*([eE][+-]?[0-9]+)?%?")


def _values(answer: Answer, columns: ResultColumns) -> tuple[Any, ...]:
    tokens = answer.prompt_tokens, answer.generated_tokens
    extras = {"reasoning": answer.reasoning, "endpoint": answer.by or HERE}
    return (answer.text, answer.finish_reason, *tokens, answer.problem, *(extras[name] for name in columns.extras))


def _columns(source: RowSource, extras: Sequence[str]) -> ResultColumns:
    first = source.columns
    known = set(first)
    later = [name for name in source.all_columns() if name not in known]
    return result_columns(first, later, extras)


def _write_jsonl(path: Path, _source: RowSource, columns: ResultColumns, answered: Answered) -> None:
    """One object per line; values keep their types."""
    named = dict(zip(columns.own, columns.named, strict=True))
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for row, answer in answered:
            own = {named.get(name, name): value for name, value in row.fields.items()}
            file.write(_json({**own, **dict(zip(columns.added, _values(answer, columns), strict=True))}) + "\n")


def _write_csv(
    path: Path, _source: RowSource, columns: ResultColumns, answered: Answered, separator: str = ","
) -> None:
    """Values as text; nested ones as JSON."""
    # With a byte order mark, without which Excel misreads UTF-8.
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow([*columns.named, *columns.added])
        for row, answer in answered:
            own = (as_text(row.fields.get(name)) for name in columns.own)
            writer.writerow([*own, *_values(answer, columns)])


def _write_parquet(path: Path, source: RowSource, columns: ResultColumns, answered: Answered) -> None:
    """The input's columns unchanged if it was parquet; otherwise text."""
    import pyarrow as pa
    import pyarrow.parquet

    fields = (
        list(source.schema)
        if isinstance(source, ParquetRows)
        else [pa.field(name, pa.string()) for name in columns.named]
    )
    kinds = [pa.string(), pa.string(), pa.int64(), pa.int64(), pa.string(), *(pa.string() for _ in columns.extras)]
    added = pa.schema(list(zip(columns.added, kinds, strict=True)))
    schema = pa.schema([*fields, *added])
    with pa.parquet.ParquetWriter(path, schema) as writer:
        batches = _same_rows(source, answered) if isinstance(source, ParquetRows) else _as_text(columns, answered)
        for own, answers in batches:
            values = zip(*(_values(answer, columns) for answer in answers), strict=True)
            new = [pa.array(column, field.type) for column, field in zip(values, added, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays([*own, *new], schema=schema))


def _same_rows(source: ParquetRows, answered: Iterator[tuple[Row, Answer]]) -> Iterator[tuple[list[Any], list[Answer]]]:
    """The input's columns of answered rows, with their answers, without converting values to Python types."""
    pair = next(answered, None)
    begin = 0
    for batch in source.batches():
        end = begin + batch.num_rows
        chosen: list[int] = []
        answers: list[Answer] = []
        while pair is not None and pair[0].index < end:
            chosen.append(pair[0].index - begin)
            answers.append(pair[1])
            pair = next(answered, None)
        if answers:
            yield [_taken(column, chosen) for column in batch.columns], answers
        begin = end


def _taken(column: Any, chosen: Sequence[int]) -> Any:
    """These values of a column, in runs: pyarrow's own `take` does not know every type."""
    import pyarrow as pa

    starts = [at for at, place in enumerate(chosen) if not at or chosen[at - 1] != place - 1]
    ends = [*starts[1:], len(chosen)]
    return pa.concat_arrays([column.slice(chosen[begin], end - begin) for begin, end in zip(starts, ends, strict=True)])


def _as_text(
    columns: ResultColumns, answered: Iterator[tuple[Row, Answer]]
) -> Iterator[tuple[list[Any], list[Answer]]]:
    import pyarrow as pa

    while pairs := list(islice(answered, _ROWS_AT_ONCE)):
        own = [
            pa.array(
                [None if (value := row.fields.get(name)) is None else as_text(value) for row, _answer in pairs],
                pa.string(),
            )
            for name in columns.own
        ]
        yield own, [answer for _row, answer in pairs]


def fits_a_sheet(columns: ResultColumns, rows: int) -> bool:
    return rows < _MOST_SHEET_ROWS and len(columns.own) + len(columns.added) <= _MOST_SHEET_COLUMNS


def require_a_sheet(source: RowSource) -> None:
    """Refuses an input that is known, or quickly found, to exceed a sheet's size with its answers."""
    columns = result_columns(source.columns, [])  # later rows may have more: checked again with the result
    if len(columns.own) + len(columns.added) > _MOST_SHEET_COLUMNS or has_rows(source, _MOST_SHEET_ROWS):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{MOST_OF_A_SHEET}; {source.path} has more: choose a csv, jsonl or parquet output.",
        )


def _write_sheet(path: Path, _source: RowSource, columns: ResultColumns, answered: Answered) -> None:
    """Numbers and dates unchanged, everything else as text that is never a formula; see `fits_a_sheet`."""
    import openpyxl
    from openpyxl.cell import WriteOnlyCell

    book = openpyxl.Workbook(write_only=True)
    try:
        sheet = book.create_sheet("Answers")

        def cell(value: Any) -> Any:
            if _is_sheet_value(value):
                return value
            text = _cut(_NOT_IN_XML.sub("\ufffd", as_text(value)))
            made = WriteOnlyCell(sheet)
            made._value = _LOOKS_ESCAPED.sub("_x005F_", text).replace("\r", "_x000D_")
            made.data_type = "s"
            return made

        sheet.append([cell(name) for name in (*columns.named, *columns.added)])
        for row, answer in answered:
            own = [row.fields.get(name) for name in columns.own]
            texts = (*own, answer.text, answer.reasoning)
            if not answer.problem and any(isinstance(text, str) and _cut(text) != text for text in texts):
                cut = f"was cut to the {_MOST_CELL_CHARACTERS:,} characters that a cell holds"
                answer = replace(answer, problem=cut)
            sheet.append([cell(value) for value in (*own, *_values(answer, columns))])
        book.save(path)
    finally:
        book.close()


def _json(record: dict[str, Any]) -> str:
    """A line of JSON; NaN and infinities become null."""
    try:
        return json.dumps(record, ensure_ascii=False, default=json_value, allow_nan=False)
    except ValueError:
        lenient = json.dumps(record, ensure_ascii=False, default=json_value)
        return json.dumps(json.loads(lenient, parse_constant=lambda _name: None), ensure_ascii=False)


def _is_sheet_value(value: Any) -> bool:
    """Whether a sheet can store it natively instead of as text."""
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int | float | Decimal):
        return math.isfinite(value) and (not isinstance(value, int) or abs(value) < _MOST_EXACT)
    if isinstance(value, datetime | date):
        return value.year >= _FIRST_YEAR and getattr(value, "tzinfo", None) is None
    return isinstance(value, time) and value.tzinfo is None


def _cut(text: str) -> str:
    """Cuts text to a cell's limit, which counts characters outside the BMP twice."""
    if 2 * len(text) <= _MOST_CELL_CHARACTERS:
        return text
    units = text.encode("utf-16-le", "replace")
    return units[: 2 * _MOST_CELL_CHARACTERS].decode("utf-16-le", "ignore")


def harmless(text: str) -> str:
    """A model's text for a csv: no control characters, and in front of what would be a formula the sign for text."""
    is_formula = _FORMULA.match(text) and not _NUMBER.fullmatch(text.strip())
    text = plain(text.replace("\r\n", "\n"))
    return f"'{text}" if is_formula else text


_FORMATS: dict[str, Callable[[Path, RowSource, ResultColumns, Answered], None]] = {
    ".jsonl": _write_jsonl,
    ".csv": _write_csv,
    ".tsv": partial(_write_csv, separator="\t"),
    ".parquet": _write_parquet,
    ".xlsx": _write_sheet,
}
OUTPUT_SUFFIXES = tuple(_FORMATS)
_ROWS_PER_LOOK = 64


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
    ledger: Journal | None = None,
    openai: bool = False,
    created_s: int = 0,
    extras: Sequence[str] = (),
    raw_text: bool = False,
    between: Between = noop,
) -> Written:
    """Writes all answered rows in input order, replacing an earlier result of the job.

    Args:
        answers: in row order.
        rows: upper limit of their number, if that may exceed the format's capacity.
        ledger: records what the job wrote; other files are left alone.
        openai: write OpenAI's batch output, with failures in the file of `errors_path`.
        created_s: when the job started, for OpenAI's output; seconds since 1970.
        extras: more columns: see `ResultColumns`.
        raw_text: write answers into csv as they are, even what a spreadsheet or a terminal would obey.

    Raises:
        EngineError: `DISK_FULL`, `INVALID_REQUEST`; the old file is unchanged.
    """
    owned = ledger or NothingWritten()
    count = failures = 0

    def counted() -> Answered:
        nonlocal count
        for count, pair in enumerate(_answered(source, iter(answers), between), 1):  # noqa: B007 - told in the end
            yield pair

    columns = None if openai else _columns(source, extras)
    if path.suffix.lower() == ".xlsx" and columns is not None and not fits_a_sheet(columns, rows):
        path = path.with_suffix(".csv")
    with disk_errors_explained(path.parent), ExitStack() as undo:
        new = undo.enter_context(NewFile(path))
        if columns is None:
            bad = undo.enter_context(NewFile(errors_path(path)))
            failures = write_openai(new.path, bad.path, counted(), created_s)
            if failures:
                bad.finish()  # before either is renamed: if there is no room, neither is
        else:
            suffix, answered = path.suffix.lower(), counted()
            if suffix in (".csv", ".tsv") and not raw_text:
                answered = (
                    (row, replace(answer, text=harmless(answer.text), reasoning=harmless(answer.reasoning)))
                    for row, answer in answered
                )
            _FORMATS[suffix](new.path, source, columns, answered)
        files = [put_in_place(new, path, "result", owned)]
        if failures:
            files.append(put_in_place(bad, errors_path(path), "errors", owned))
        _remove_old_errors(files, owned)
        owned.keep_only(files)
    places = [
        asked if file.path == absolute(asked) else Path(file.path)
        for file, asked in zip(files, (path, errors_path(path)), strict=False)
    ]
    return Written(count, places[0], path, *places[1:])


def _remove_old_errors(files: Sequence[WrittenFile], ledger: Journal | NothingWritten) -> None:
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


def _answered(source: RowSource, answers: Iterator[Answer], between: Between) -> Iterator[tuple[Row, Answer]]:
    answer = next(answers, None)
    for row in source.rows():
        if answer is None:
            return
        if row.index % _ROWS_PER_LOOK == 0:
            between(row.share)
        if answer.row == row.index:
            yield row, answer
            answer = next(answers, None)
