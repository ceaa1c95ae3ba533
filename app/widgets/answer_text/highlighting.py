"""Syntax highlighting by Pygments, in small time slices so that it never blocks the window."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

from PySide6.QtCore import QObject
from PySide6.QtGui import QFont, QTextBlock, QTextCharFormat, QTextCursor, QTextDocument, QTextLayout

from app.services.background import timer
from app.widgets.answer_text.style import COLOURED, Style

MAX_CHARACTERS = 100_000  # longer code is not highlighted
MAX_LINE = 5_000  # nor is code with a longer line: some lexers take quadratic time in it
_SLICE_S = 0.006
_PAUSE_SHARE = 10
_LONGEST_PAUSE_MS = 2_000

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
    name = language.lower().strip("{}.")
    return _aliases().get(name) or _aliases().get(name.split(":")[0]) if name else None


@dataclass(slots=True)
class _Card:
    start: QTextCursor
    language: str
    code: str = ""
    lines: list[LineFormats] = field(default_factory=list)


class Highlighter(QObject):
    """Colours the code in a document: whole lines, in slices between which the window does something else.

    Code that grows is read again from its beginning, as a quotation mark may be closed lines later: the less often, the
    longer that takes.
    """

    def __init__(self, document: QTextDocument, style: Style) -> None:
        super().__init__(document)
        self._document = document
        self._formats = {name: QTextCharFormat() for name in (*COLOURED, "function")}
        for name in COLOURED:
            self._formats[name].setForeground(style.syntax(name))
        self._formats["function"].setFontWeight(QFont.Weight.Bold)
        self._cards: dict[int, _Card] = {}
        self._changed: dict[int, None] = {}  # in the order in which they are to be read
        self._scan: Iterator[tuple[int, LineFormats] | None] | None = None
        self._card: _Card | None = None  # that is read
        self._block = QTextBlock()
        self._line = 0
        self._spent_s = 0.0
        self._timer = timer(self, self._slice, once=True)
        self.scans = 0

    def show(self, number: int, start: int, language: str, code: str, *, is_open: bool) -> None:
        if find_lexer(language) is None:
            return
        card = self._cards.get(number)
        if card is None:
            cursor = QTextCursor(self._document)
            cursor.setPosition(start)
            cursor.setKeepPositionOnInsert(True)
            card = self._cards[number] = _Card(cursor, language)
        finished = code[: code.rfind("\n") + 1] if is_open else code
        if finished != card.code:
            card.code = finished
            self._changed[number] = None
            if not self._timer.isActive():
                self._timer.start(0)

    def forget(self, first: int) -> None:
        for number in [number for number in self._cards if number >= first]:
            if self._cards.pop(number) is self._card:
                self._card = self._scan = None
            self._changed.pop(number, None)

    def finish(self) -> None:
        self._timer.stop()
        while self._advance(float("inf")):
            pass

    def _slice(self) -> None:
        started = time.perf_counter()
        is_more = self._advance(started + _SLICE_S)
        self._spent_s += time.perf_counter() - started
        if self._card is not None:
            self._timer.start(0)
        elif is_more:
            is_again = all(self._cards[number].lines for number in self._changed)
            self._timer.start(round(min(_PAUSE_SHARE * 1000 * self._spent_s, _LONGEST_PAUSE_MS)) if is_again else 0)
            self._spent_s = 0.0

    def _advance(self, deadline: float) -> bool:
        """Reads code until then, or to the end of one; whether there is more to read."""
        if self._card is None and self._changed:
            number = next(iter(self._changed))
            del self._changed[number]
            self._begin(self._cards[number])
        while self._scan is not None:
            try:
                found = next(self._scan)
            except StopIteration:
                self._card = self._scan = None
            except Exception:
                # Lexers are large sets of regular expressions; if one fails, its code stays plain.
                self._card = self._scan = None
            else:
                if found is not None:
                    self._colour(*found)
                if time.perf_counter() > deadline:
                    return True
        return bool(self._changed)

    def _begin(self, card: _Card) -> None:
        if len(card.code) > MAX_CHARACTERS or any(len(line) > MAX_LINE for line in card.code.split("\n")):
            return
        lexer = find_lexer(card.language)
        assert lexer is not None
        self.scans += 1
        self._card, self._scan = card, _scan(*lexer, card.code.removesuffix("\n"))
        self._block, self._line = card.start.block(), 0

    def _colour(self, number: int, formats: LineFormats) -> None:
        card = self._card
        assert card is not None
        while self._line < number:
            self._block, self._line = self._block.next(), self._line + 1
        while len(card.lines) <= number:
            card.lines.append([])
        if card.lines[number] == formats or not self._block.isValid():
            return
        card.lines[number] = formats
        ranges = []
        for start, length, name in formats:
            one = QTextLayout.FormatRange()
            one.start, one.length, one.format = start, length, self._formats[name]
            ranges.append(one)
        self._block.layout().setFormats(ranges)
        self._document.markContentsDirty(self._block.position(), self._block.length())


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
