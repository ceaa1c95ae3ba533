"""The text of a pdf: one row."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.batch_files.row import Row
from engine.batch_files.text_lines import MAX_LINE_CHARACTERS

_MAX_PAGES = 5_000


class PdfText:
    """The whole file is one row with the columns `file`, `pages` and `text`; if unreadable, the row has a problem."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._row: Row | None = None

    @property
    def path(self) -> Path:
        return self._path

    @property
    def columns(self) -> tuple[str, ...]:
        return ("file", "pages", "text")

    def all_columns(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return self.columns

    def rows(self) -> Iterator[Row]:
        """See `RowSource`."""
        if self._row is None:  # a long book takes a minute
            text, pages, problem = _text_of(self._path)
            self._row = Row(0, {"file": self._path.name, "pages": pages, "text": text}, problem, 1.0)
        yield self._row


def _why_not(reader: Any) -> str:
    """Why an encrypted file cannot be read, completing a sentence; empty if it opens without a password."""
    from pypdf.errors import DependencyError

    try:
        return "" if reader.decrypt("") else "is protected by a password; save it without one"
    except DependencyError:  # AES needs another package, so it is unknown whether there is a password
        return "is encrypted with AES, which is not supported; print it to a new pdf, or save it unprotected"


def _text_of(path: Path) -> tuple[str, int, str]:
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns about every minor defect
    try:
        with pypdf.PdfReader(path) as reader:
            if reader.is_encrypted and (why_not := _why_not(reader)):
                return "", 0, why_not
            pages = len(reader.pages)
            if pages > _MAX_PAGES:
                return "", pages, f"has {pages:,} pages, more than {_MAX_PAGES:,}"
            parts: list[str] = []
            length = 0
            for page in reader.pages:
                parts.append(page.extract_text())
                length += len(parts[-1])
                if length > MAX_LINE_CHARACTERS:
                    return "", pages, f"has more than {MAX_LINE_CHARACTERS:,} characters"
    except Exception as error:  # anything a damaged or hostile file makes the parser raise
        return "", 0, f"cannot be read as a pdf ({str(error)[:80] or type(error).__name__})"
    text = "\n\n".join(parts).encode("utf-8", "replace").decode("utf-8").strip()
    return text, pages, "" if text else "contains no text, possibly only images"
