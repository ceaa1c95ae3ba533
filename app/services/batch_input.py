"""Previews an input file or folder before a job starts.  Slow: not for the GUI thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from engine.batch_files.job_watcher import StoppedError
from engine.batch_files.openai_format import errors_path, holds_openai_requests
from engine.batch_files.opening import INPUT_SUFFIXES, FolderRows, InputForm, counted_rows, open_source
from engine.batch_files.prompts import as_text, template_of
from engine.batch_files.rows import Row
from engine.batch_files.tables import SpreadsheetRows
from engine.common.errors import EngineError
from engine.common.pictures import SUFFIXES

SHOWN_ROWS = 5
_MOST_CHARACTERS = 300
TEXT_SUFFIXES = frozenset({".txt", ".md", ".csv", ".tsv", ".jsonl", ".ndjson"})


@dataclass(frozen=True, slots=True)
class InputPreview:
    """The contents of an input.

    Attributes:
        path, form: what was opened, and how.
        columns: of every row.
        rows: the first ones, one text per column.
        template: the suggested prompt; empty if none is obvious.
        openai: whether rows are OpenAI requests.
        is_text: whether the encoding matters.
        is_delimited: whether the separator matters.
        sheets: of a workbook with several that have rows; `sheet` is the one that was read.
        has_plain_text: whether a row may be a whole text file or one of its lines; `whole_files`: which it is.
        problem: what is wrong with the first invalid row, as the end of a sentence; empty if all are valid.
        image_column: the column whose cells are named like pictures; empty if there is none.
    """

    path: Path
    form: InputForm
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    template: str
    openai: bool
    is_text: bool
    is_delimited: bool
    sheets: tuple[str, ...]
    sheet: str
    has_plain_text: bool
    whole_files: bool
    problem: str
    image_column: str = ""


def look_at(path: Path, form: InputForm) -> InputPreview:
    """Opens an input and reads its first rows.

    Raises:
        EngineError: `INVALID_REQUEST`, in one sentence.
    """
    source = open_source(path, form)
    columns = source.columns
    first = list(islice(source.rows(), 200))
    shown = tuple(
        tuple(as_text(row.fields.get(name))[:_MOST_CHARACTERS] for name in columns) for row in first[:SHOWN_ROWS]
    )
    suffixes = (
        {file.suffix.lower() for file in source.files} if isinstance(source, FolderRows) else {path.suffix.lower()}
    )
    openai = holds_openai_requests(source)
    image_column = "" if openai else _image_column(columns, first)
    try:
        template = "" if openai else template_of(columns, image_column).text
    except EngineError:
        template = ""
    return InputPreview(
        path=path,
        form=form,
        columns=columns,
        rows=shown,
        template=template,
        openai=openai,
        is_text=bool(suffixes & TEXT_SUFFIXES),
        is_delimited=".csv" in suffixes,
        sheets=source.sheet_names if isinstance(source, SpreadsheetRows) and len(source.sheet_names) > 1 else (),
        sheet=source.sheet if isinstance(source, SpreadsheetRows) else "",
        has_plain_text=".txt" in suffixes,
        whole_files=isinstance(source, FolderRows) if form.whole_files is None else form.whole_files,
        problem=next((row.problem for row in first if row.problem), ""),
        image_column=image_column,
    )


def _image_column(columns: Sequence[str], rows: Sequence[Row]) -> str:
    for name in columns:
        cells = [as_text(row.fields.get(name)).strip()[:4096] for row in rows]
        named = sum(cell.lower().endswith(SUFFIXES) or cell[:11].lower() == "data:image/" for cell in cells)
        if named * 2 > len(cells):
            return name
    return ""


def count_rows(path: Path, form: InputForm, cancelled: Callable[[], bool]) -> int | None:
    """The number of rows; None if counting would take long, or the input cannot be read."""

    def between(_share: float) -> None:
        if cancelled():
            raise StoppedError

    try:
        return counted_rows(open_source(path, form), between)
    except (EngineError, OSError, StoppedError):
        return None


def can_be_read(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() in INPUT_SUFFIXES


def free_output(source: Path, suffix: str) -> Path:
    """An unused name beside the input: `complaints.answers.csv`, numbered if necessary."""
    stem = source.name if source.is_dir() else source.stem
    number = 1
    while True:
        path = source.parent / f"{stem}.answers{'' if number == 1 else f'-{number}'}{suffix}"
        if not path.exists() and not errors_path(path).exists():
            return path
        number += 1


def usual_suffix(source: Path) -> str:
    suffix = source.suffix.lower()
    return suffix if source.is_file() and suffix in (".csv", ".tsv", ".parquet", ".xlsx") else ".jsonl"
