"""Plain text: one row per line, or one row per file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.batch_files.decoded_text import WRONG_ENCODING, encoding_of, is_text, open_text
from engine.batch_files.row import Row

MAX_LINE_CHARACTERS = 16 * 2**20
"""Longer than any model's context: such a line is not read completely."""


class TextLines:
    """Every non-blank line is a row with one column, `text`."""

    def __init__(self, path: Path, *, encoding: str | None = None) -> None:
        self._path = path
        self._encoding = encoding_of(path, encoding)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def columns(self) -> tuple[str, ...]:
        return ("text",)

    def all_columns(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return self.columns

    def rows(self) -> Iterator[Row]:
        """See `RowSource`."""
        index = 0
        with open_text(self._path, self._encoding) as (file, share):
            for line, whole in _lines(file):
                if not line.strip():
                    continue
                problem = "" if whole else f"has a line of more than {MAX_LINE_CHARACTERS:,} characters"
                if not is_text(line):
                    problem = WRONG_ENCODING
                yield Row(index, {"text": "" if problem else line.rstrip("\r\n")}, problem, share())
                index += 1


class WholeText:
    """The whole file is one row, with the columns `file` and `text`."""

    def __init__(self, path: Path, *, encoding: str | None = None) -> None:
        self._path = path
        self._encoding = encoding_of(path, encoding)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def columns(self) -> tuple[str, ...]:
        return ("file", "text")

    def all_columns(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return self.columns

    def rows(self) -> Iterator[Row]:
        """See `RowSource`."""
        with open_text(self._path, self._encoding) as (file, _share):
            text = file.read(MAX_LINE_CHARACTERS + 1).replace("\r\n", "\n")
        problem = ""
        if len(text) > MAX_LINE_CHARACTERS:
            problem = f"has more than {MAX_LINE_CHARACTERS:,} characters"
        elif not is_text(text):
            problem = WRONG_ENCODING
        yield Row(0, {"file": self._path.name, "text": "" if problem else text}, problem, 1.0)


def _lines(file: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Lines, and whether they are complete; only the beginning of one that is too long."""
    read = file.readline  # type: ignore[attr-defined]
    while line := read(MAX_LINE_CHARACTERS):
        whole = len(line) < MAX_LINE_CHARACTERS or line.endswith(("\n", "\r"))
        yield line, whole
        while not whole and (rest := read(MAX_LINE_CHARACTERS)):
            whole = rest.endswith(("\n", "\r")) or len(rest) < MAX_LINE_CHARACTERS
