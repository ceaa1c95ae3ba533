"""Syntax highlighting by Pygments, in small time slices so that it never blocks the window."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeAlias

from PySide6.QtGui import QFont, QSyntaxHighlighter, QTextCharFormat, QTextDocument

from app.widgets.markdown_view.style import Style

MAX_CHARACTERS = 100_000  # longer code is not highlighted
MAX_LINE = 5_000  # nor is code with a longer line: some lexers take quadratic time in it

LineFormats: TypeAlias = list[tuple[int, int, str]]
"""(start, length, token style) in UTF-16 units."""

# Pygments token names, most specific first, and their styles.
_TOKEN_STYLES = (
    ("Token.Comment", "comment"),
    ("Token.Keyword.Type", "type"),
    ("Token.Keyword", "keyword"),
    ("Token.Operator.Word", "keyword"),
    ("Token.Literal.String", "string"),
    ("Token.Literal.Number", "number"),
    ("Token.Name.Function", "function"),
    ("Token.Name.Class", "function"),
    ("Token.Name.Tag", "keyword"),
    ("Token.Name.Attribute", "type"),
    ("Token.Name.Decorator", "type"),
    ("Token.Name.Exception", "type"),
    ("Token.Name.Builtin.Pseudo", "keyword"),
    ("Token.Generic.Inserted", "inserted"),
    ("Token.Generic.Deleted", "deleted"),
    ("Token.Generic.Heading", "function"),
    ("Token.Generic.Subheading", "function"),
    ("Token.Generic.Prompt", "comment"),
)


def token_style(token: str) -> str:
    """The style of a Pygments token type by name; empty for plain text."""
    for prefix, name in _TOKEN_STYLES:
        if token == prefix or token.startswith(prefix + "."):
            return name
    return ""


@cache
def _aliases() -> dict[str, tuple[str, str]]:
    """Language name -> (module, class) of every lexer bundled with Pygments; plug-ins are not searched."""
    from pygments.lexers._mapping import LEXERS

    return {alias.lower(): (entry[0], name) for name, entry in LEXERS.items() for alias in entry[2]}


def find_lexer(language: str) -> tuple[str, str] | None:
    """Module and class of the lexer for a fence's language, or None."""
    name = language.lower().strip("{}.")
    return _aliases().get(name) or _aliases().get(name.split(":")[0]) if name else None


class CodeHighlighter(QSyntaxHighlighter):
    """Highlights a document with the results of the last complete or partial scan of its text."""

    def __init__(self, document: QTextDocument) -> None:
        super().__init__(document)
        self._lines: list[LineFormats] = []
        self._formats: dict[str, QTextCharFormat] = {}
        self._scan: Iterator[tuple[int, LineFormats] | None] | None = None
        self.scans = 0

    def set_style(self, style: Style) -> None:
        self._formats = {}
        for name in ("comment", "keyword", "string", "number", "type", "inserted", "deleted"):
            form = QTextCharFormat()
            form.setForeground(style.syntax(name))
            self._formats[name] = form
        bold = QTextCharFormat()
        bold.setFontWeight(QFont.Weight.Bold)
        self._formats["function"] = bold
        self.rehighlight()

    def start(self, code: str, language: str) -> bool:
        """Starts a new scan; False if this code is not highlighted at all."""
        self._scan = None
        if len(code) > MAX_CHARACTERS or any(len(line) > MAX_LINE for line in code.split("\n")):
            return False
        lexer = find_lexer(language)
        if lexer is None:
            return False
        self.scans += 1
        self._scan = _scan(*lexer, code)
        return True

    def advance(self, seconds: float) -> bool:
        """Continues the scan for about this long, updating lines whose formats changed; False when it is complete."""
        deadline = time.perf_counter() + seconds
        document = self.document()
        while self._scan is not None and document is not None:
            try:
                found = next(self._scan)
            except StopIteration:
                self._scan = None
            except Exception:
                # Lexers are large sets of regular expressions; if one fails, its code stays plain.
                self._scan = None
            else:
                if found is not None:
                    self._set_line(document, *found)
                if time.perf_counter() > deadline:
                    return True
        return False

    def reset(self) -> None:
        """Removes all colours."""
        self._scan = None
        self._lines = []

    def highlightBlock(self, text: str) -> None:  # noqa: ARG002
        number = self.currentBlock().blockNumber()
        if number < len(self._lines):
            for start, length, name in self._lines[number]:
                self.setFormat(start, length, self._formats[name])

    def _set_line(self, document: QTextDocument, number: int, formats: LineFormats) -> None:
        while len(self._lines) <= number:
            self._lines.append([])
        if self._lines[number] != formats:
            self._lines[number] = formats
            self.rehighlightBlock(document.findBlockByNumber(number))


def _scan(module: str, class_name: str, code: str) -> Iterator[tuple[int, LineFormats] | None]:
    """Line numbers and their formats, top to bottom; yields for every line, also those without any.

    Yields None between the slow steps of a language's first use: the import, and compiling its expressions.
    """
    lexer_class: Any = getattr(importlib.import_module(module), class_name)
    yield None
    lexer = lexer_class(stripnl=False, ensurenl=False)
    yield None
    number = 0
    column = 0
    formats: LineFormats = []
    for _, token, value in lexer.get_tokens_unprocessed(code + "\n"):
        name = token_style(str(token))
        first = True
        for part in value.split("\n"):
            if not first:
                yield number, formats
                number, column, formats = number + 1, 0, []
            first = False
            length = len(part) if part.isascii() else len(part.encode("utf-16-le", "replace")) // 2
            if name and length:
                if formats and formats[-1][2] == name and sum(formats[-1][:2]) == column:
                    start, before, _ = formats.pop()
                    formats.append((start, before + length, name))
                else:
                    formats.append((column, length, name))
            column += length
