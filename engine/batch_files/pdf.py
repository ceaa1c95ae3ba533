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
    """The whole file is one row, with the columns `file`, `pages` and `text`; it cannot be read is a row's problem."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._row: Row | None = None

    @property
    def path(self) -> Path:
        return self._path

    @property
    def columns(self) -> tuple[str, ...]:
        return ("file", "pages", "text")

    def rows(self) -> Iterator[Row]:
        """See `RowSource`."""
        if self._row is None:  # a book takes a minute
            text, pages, problem = _text_of(self._path)
            self._row = Row(0, {"file": self._path.name, "pages": pages, "text": text}, problem, 1.0)
        yield self._row


def _opens(reader: Any) -> bool:
    """Whether it opens without a password."""
    from pypdf.errors import DependencyError

    try:
        return bool(reader.decrypt(""))
    except DependencyError:  # a cipher that only another package knows
        return False


def _text_of(path: Path) -> tuple[str, int, str]:
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it comments on every blemish of a file
    try:
        with pypdf.PdfReader(path) as reader:
            if reader.is_encrypted and not _opens(reader):
                return "", 0, "is protected by a password; save it without one"
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
    except Exception as error:  # whatever its parser meets in a damaged or hostile file
        return "", 0, f"cannot be read as a pdf ({str(error)[:80] or type(error).__name__})"
    text = "\n\n".join(parts).encode("utf-8", "replace").decode("utf-8").strip()
    return text, pages, "" if text else "holds no text, only pictures perhaps"
