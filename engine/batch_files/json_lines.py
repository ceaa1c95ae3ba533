"""jsonl: one object or string per line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.batch_files.columns import SeenColumns
from engine.batch_files.decoded_text import sound
from engine.batch_files.row import Row
from engine.batch_files.text_lines import TextLines
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import DEEPEST, parse_json

_LOOKED_AT = 200
"""Number of first rows that determine the columns; further ones in later rows are kept too."""


class JsonLines:
    """One row per non-blank line; a string is a row with a single column `text`."""

    def __init__(self, path: Path, *, encoding: str | None = None) -> None:
        self._lines = TextLines(path, encoding=encoding)
        first = list(itertools.islice(self._rows(), _LOOKED_AT))
        self._columns = tuple(dict.fromkeys(name for row in first for name in row.fields))
        self._seen = SeenColumns(self._columns)
        if first and not self._columns:
            why = first[0].problem or "has no columns"
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{path} has no usable rows: its first line {why}; write one JSON object per line.",
            )

    @property
    def path(self) -> Path:
        return self._lines.path

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns

    def all_columns(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return self._seen.all_of(self.rows())

    def rows(self) -> Iterator[Row]:
        """See `RowSource`."""
        return self._seen.through(self._rows())

    def _rows(self) -> Iterator[Row]:
        for row in self._lines.rows():
            if row.problem:
                yield Row(row.index, {}, row.problem, row.share)
                continue
            fields, problem = _fields(row.fields["text"])
            yield Row(row.index, fields, problem, row.share)


def _fields(line: str) -> tuple[dict[str, Any], str]:
    try:
        value = parse_json(line, deepest=DEEPEST)
    except ValueError as error:
        return {}, f"is not JSON ({str(error)[:80]})"
    if "\\ud" in line.lower():
        value = sound(value)
    if isinstance(value, str):
        return {"text": value}, ""
    if isinstance(value, dict):
        return value, ""
    return {}, f"is {_named(value)}, not an object or a string"


def _named(value: object) -> str:
    names = {list: "a list", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), "something else")
