"""The formats of result files."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from engine.batch_files.answer import Answer
from engine.batch_files.columns import ResultColumns, result_columns
from engine.batch_files.parquet import ParquetRows
from engine.batch_files.row import Row, RowSource
from engine.batch_files.row_count import has_rows
from engine.batch_files.template import as_text, json_value
from engine.common.errors import EngineError, ErrorCode

_ROWS_AT_ONCE = 512
_MOST_SHEET_ROWS = 1_048_576
_MOST_SHEET_COLUMNS = 16_384
MOST_OF_A_SHEET = f"An xlsx sheet holds at most {_MOST_SHEET_ROWS:,} rows and {_MOST_SHEET_COLUMNS:,} columns"
_MOST_CELL_CHARACTERS = 32_767
_MOST_EXACT = 10**15
"""Sheet numbers are floating point: longer integers, such as account numbers, would lose digits."""
_FIRST_YEAR = 1900
_NOT_IN_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def _values(answer: Answer) -> tuple[Any, ...]:
    return answer.text, answer.finish_reason, answer.prompt_tokens, answer.generated_tokens, answer.problem


def _columns(source: RowSource) -> ResultColumns:
    first = source.columns
    known = set(first)
    return result_columns(first, [name for name in source.all_columns() if name not in known])


class JsonLinesResult:
    """One object per line; values keep their types."""

    def write(self, path: Path, source: RowSource, answered: Iterator[tuple[Row, Answer]]) -> None:
        columns = _columns(source)
        named = dict(zip(columns.own, columns.named, strict=True))
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for row, answer in answered:
                own = {named.get(name, name): value for name, value in row.fields.items()}
                file.write(_json({**own, **dict(zip(columns.added, _values(answer), strict=True))}) + "\n")


@dataclass(frozen=True, slots=True)
class CsvResult:
    """Values as text; nested ones as JSON."""

    separator: str

    def write(self, path: Path, source: RowSource, answered: Iterator[tuple[Row, Answer]]) -> None:
        columns = _columns(source)
        # With a byte order mark, without which Excel misreads UTF-8.
        with open(path, "w", encoding="utf-8-sig", newline="") as file:
            writer = csv.writer(file, delimiter=self.separator)
            writer.writerow([*columns.named, *columns.added])
            for row, answer in answered:
                writer.writerow([*(as_text(row.fields.get(name)) for name in columns.own), *_values(answer)])


class ParquetResult:
    """The input's columns unchanged if it was parquet; otherwise text."""

    def write(self, path: Path, source: RowSource, answered: Iterator[tuple[Row, Answer]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet

        columns = _columns(source)
        fields = (
            list(source.schema)
            if isinstance(source, ParquetRows)
            else [pa.field(name, pa.string()) for name in columns.named]
        )
        kinds = (pa.string(), pa.string(), pa.int64(), pa.int64(), pa.string())
        added = pa.schema(list(zip(columns.added, kinds, strict=True)))
        schema = pa.schema([*fields, *added])
        with pa.parquet.ParquetWriter(path, schema) as writer:
            batches = _same_rows(source, answered) if isinstance(source, ParquetRows) else _as_text(columns, answered)
            for own, answers in batches:
                values = zip(*map(_values, answers), strict=True)
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
            yield batch.take(chosen).columns, answers
        begin = end


def _as_text(
    columns: ResultColumns, answered: Iterator[tuple[Row, Answer]]
) -> Iterator[tuple[list[Any], list[Answer]]]:
    import pyarrow as pa

    while pairs := list(islice(answered, _ROWS_AT_ONCE)):
        own = [
            pa.array([_text_or_none(row.fields.get(name)) for row, _answer in pairs], pa.string())
            for name in columns.own
        ]
        yield own, [answer for _row, answer in pairs]


def fits_a_sheet(source: RowSource, rows: int) -> bool:
    """Whether this many rows fit into a sheet with their answers; may read the whole input."""
    columns = _columns(source)
    return rows < _MOST_SHEET_ROWS and len(columns.own) + len(columns.added) <= _MOST_SHEET_COLUMNS


def require_a_sheet(source: RowSource) -> None:
    """Refuses an input that is known, or quickly found, to exceed a sheet's size with its answers.

    Raises:
        EngineError: `INVALID_REQUEST`, or as the source's `rows`.
    """
    columns = result_columns(source.columns, [])  # later rows may have more: checked again with the result
    if len(columns.own) + len(columns.added) > _MOST_SHEET_COLUMNS or has_rows(source, _MOST_SHEET_ROWS):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{MOST_OF_A_SHEET}; {source.path} has more: choose a csv, jsonl or parquet output.",
        )


class SpreadsheetResult:
    """Numbers and dates unchanged, everything else as text that is never a formula; see `fits_a_sheet`."""

    def write(self, path: Path, source: RowSource, answered: Iterator[tuple[Row, Answer]]) -> None:
        import openpyxl
        from openpyxl.cell import WriteOnlyCell

        columns = _columns(source)
        book = openpyxl.Workbook(write_only=True)
        try:
            sheet = book.create_sheet("Answers")

            def cell(value: Any) -> Any:
                if _is_sheet_value(value):
                    return value
                made = WriteOnlyCell(sheet, _cut(_NOT_IN_XML.sub("\ufffd", as_text(value))))
                made.data_type = "s"
                return made

            sheet.append([cell(name) for name in (*columns.named, *columns.added)])
            for row, answer in answered:
                own = [row.fields.get(name) for name in columns.own]
                text, *rest, problem = _values(answer)
                if any(isinstance(value, str) and _cut(value) != value for value in (*own, text)):
                    problem = problem or f"was cut to the {_MOST_CELL_CHARACTERS:,} characters that a cell holds"
                sheet.append([cell(value) for value in (*own, text, *rest, problem)])
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


def _text_or_none(value: Any) -> str | None:
    return None if value is None else as_text(value)
