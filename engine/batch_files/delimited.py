"""csv and tsv: the first line names the columns; fields may hold quotes, separators and newlines."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from engine.batch_files.decoded_text import WRONG_ENCODING, encoding_of, is_text, open_text
from engine.batch_files.row import Row, unique_names
from engine.common.errors import EngineError, ErrorCode

MAX_FIELD_CHARACTERS = 4 * 2**20
"""A longer field means an unclosed quote."""

_SEPARATORS = ",;\t|"
_NO_SEPARATOR = "\x1f"
"""Used for files with one column, where commas are part of the text."""


class DelimitedRows:
    """One row per record.

    Raises:
        EngineError: `INVALID_REQUEST`, if there is no header.
    """

    def __init__(self, path: Path, *, separator: str | None = None, encoding: str | None = None) -> None:
        self._path = path
        self._encoding = encoding_of(path, encoding)
        with open_text(path, self._encoding) as (file, _share):
            header = file.readline(MAX_FIELD_CHARACTERS)
        if not header.strip() or not is_text(header):
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{path} does not begin with a readable line of column names: add one"
                f"{', or name the encoding with --encoding' if header.strip() else ''}.",
            )
        self._separator = separator or _separator_of(header)
        with open_text(path, self._encoding) as (file, _share):
            try:
                names = next(self._reader(file))
            except csv.Error as error:
                raise EngineError(
                    ErrorCode.INVALID_REQUEST, f"{path} has a header row that is not valid csv ({error})."
                ) from None
        self._columns = unique_names(names)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns

    def all_columns(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return self.columns

    def rows(self) -> Iterator[Row]:
        """See `RowSource`."""
        with open_text(self._path, self._encoding) as (file, share):
            reader = self._reader(file)
            next(reader)
            index = 0
            while True:
                begun = reader.line_num + 1
                try:
                    values = next(reader, None)
                except csv.Error as error:
                    # Later records cannot be separated: most likely a quote was not closed.
                    yield Row(index, {}, f"and all later rows cannot be read, from line {begun:,} on ({error})", 1.0)
                    return
                if values is None:
                    return
                if not values:
                    continue
                yield self._row(index, values, share())
                index += 1

    def _row(self, index: int, values: list[str], share: float) -> Row:
        problem = ""
        if len(values) > len(self._columns):
            problem = f"has {len(values)} fields, but the header has {len(self._columns)}"
        elif not all(map(is_text, values)):
            values = [value if is_text(value) else value.encode("utf-8", "replace").decode() for value in values]
            problem = WRONG_ENCODING
        return Row(index, dict(zip(self._columns, values, strict=False)), problem, share)

    def _reader(self, file: Iterator[str]) -> csv._reader:  # type: ignore[name-defined,unused-ignore]
        csv.field_size_limit(MAX_FIELD_CHARACTERS)
        return csv.reader(file, delimiter=self._separator)


def _separator_of(header: str) -> str:
    """The separator that splits the header into the most names, if any."""
    outside = "".join(part for place, part in enumerate(header.split('"')) if place % 2 == 0)
    found = max(_SEPARATORS, key=outside.count)
    return found if found in outside else _NO_SEPARATOR
