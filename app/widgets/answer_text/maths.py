"""Formulas in a text document: their source until there is a picture, then one character that is drawn as it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from PySide6.QtCore import QObject, QRect, QRectF, QSizeF, Signal
from PySide6.QtGui import (
    QFontMetrics,
    QPainter,
    QPyTextObject,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
)

from app.services.formulas import Formula, Formulas, Picture, formulas

OBJECT = "\ufffc"
_KIND = QTextFormat.ObjectTypes.UserObject.value + 1
_PROPERTY = QTextFormat.Property.UserProperty.value
SOURCE, TEX, DISPLAY, EM = (_PROPERTY + number for number in range(4))
"""Of the format of a formula: its source with delimiters, its TeX, whether it is displayed, and its em in pixels."""


class FormulaObjects(QPyTextObject):
    def __init__(self, document: QTextDocument, picture: Callable[[Formula], Picture | None]) -> None:
        super().__init__(document)
        self._picture = picture
        document.documentLayout().registerHandler(_KIND, self)

    def intrinsicSize(self, document: QTextDocument, position: int, form: QTextFormat) -> QSizeF:
        char = form.toCharFormat()
        picture = self._picture(formula_of(char))
        if picture is None:
            return QSizeF(0, 0)
        scale = self._scale(picture, document, position, char)
        above, below = picture.ascent * scale, picture.descent * scale
        if char.verticalAlignment() != QTextCharFormat.VerticalAlignment.AlignMiddle:
            return QSizeF(picture.width * scale, above + below)
        # Qt puts the middle of an object on the middle of the small letters; nothing else would let it reach below the
        # line.  So it gets as high as its larger half needs, and what is drawn in it stands on the text's line.
        middle = _middle(char)
        return QSizeF(picture.width * scale, 2 * max(above - middle, below + middle))

    def drawObject(
        self, painter: QPainter, rect: QRectF | QRect, document: QTextDocument, position: int, form: QTextFormat
    ) -> None:
        char = form.toCharFormat()
        picture = self._picture(formula_of(char))
        rect = QRectF(rect)
        if picture is not None:
            scale = self._scale(picture, document, position, char)
            is_inline = char.verticalAlignment() == QTextCharFormat.VerticalAlignment.AlignMiddle
            base = rect.top() + picture.ascent * scale
            if is_inline:
                # In a line that is higher than the object Qt puts it in the middle of that.
                block = document.findBlock(position)
                line = block.layout().lineForTextPosition(position - block.position())
                base = rect.center().y() - line.height() / 2 + line.ascent()
            height = (picture.ascent + picture.descent) * scale
            target = QRectF(rect.left(), base - picture.ascent * scale, picture.width * scale, height)
            picture.paint(painter, target, char.foreground().color())

    def _scale(self, picture: Picture, document: QTextDocument, position: int, char: QTextCharFormat) -> float:
        """Pixels of an em; less for one that is wider than the text."""
        em = float(char.property(EM))
        block = document.findBlock(position).blockFormat()
        room = document.textWidth() - block.leftMargin() - block.rightMargin()
        width = picture.width * em
        return em * room / width if 0 < room < width else em


def formula_of(char: QTextCharFormat) -> Formula:
    return Formula(str(char.property(TEX)), bool(char.property(DISPLAY)))


def formula_in(tex: str, source: str) -> Formula:
    return Formula(tex, display=source.startswith(("$$", "\\[")))


def _middle(char: QTextCharFormat) -> float:
    return QFontMetrics(char.font()).xHeight() / 4.0


@dataclass(slots=True)
class _Place:
    position: int
    length: int
    char: QTextCharFormat


class FormulaWriter(QObject):
    """Writes formulas into a document, and replaces their source when the pictures come.

    With `drawn` no others come: a document of another thread than the window's has pictures of its own.

    Signals:
        moved: what was at this place, or after it, is now so much further on.
        settled: all that were drawn by now are shown.
    """

    moved = Signal(int, int)
    settled = Signal()

    def __init__(self, document: QTextDocument, drawn: Mapping[Formula, Picture] | None = None) -> None:
        super().__init__(document)
        self._document = document
        self._drawn = drawn
        self._shared: Formulas | None = None
        self._is_ready = False
        self._waiting: dict[Formula, list[_Place]] = {}

    def write(
        self,
        cursor: QTextCursor,
        formula: Formula,
        source: str,
        em: float,
        base: QTextCharFormat,
        code: QTextCharFormat,
    ) -> None:
        """Writes it: as a picture in text of the format `base`, or as its source in the format `code`."""
        is_alone = formula.display and cursor.atBlockStart()
        if not self._is_ready:
            self._is_ready = True
            if self._drawn is None:
                self._shared = formulas()
                self._shared.drawn.connect(self._on_drawn)
            FormulaObjects(self._document, self._picture)
        char, written = QTextCharFormat(base), QTextCharFormat(code)
        for name, value in ((SOURCE, source), (TEX, formula.tex), (DISPLAY, formula.display), (EM, em)):
            char.setProperty(name, value)
            written.setProperty(name, value)
        if not is_alone:
            char.setVerticalAlignment(QTextCharFormat.VerticalAlignment.AlignMiddle)
        char.setObjectType(_KIND)
        if self._picture(formula) is not None:
            cursor.insertText(OBJECT, char)
            return
        start = cursor.position()
        cursor.insertText(source.replace("\n", "\u2028"), written)
        if self._shared is not None and self._shared.ask(formula):
            self._waiting.setdefault(formula, []).append(_Place(start, cursor.position() - start, char))

    def forget(self, position: int) -> None:
        for formula, places in list(self._waiting.items()):
            self._waiting[formula] = [place for place in places if place.position < position]
            if not self._waiting[formula]:
                del self._waiting[formula]

    def _on_drawn(self, formula: Formula) -> None:
        places = self._waiting.pop(formula, None)
        if places is None:
            return
        if self._picture(formula) is not None:
            for place in sorted(places, key=lambda place: -place.position):
                self._replace(place)
        self.settled.emit()

    def _picture(self, formula: Formula) -> Picture | None:
        if self._shared is not None:
            return self._shared.picture(formula)
        return self._drawn.get(formula) if self._drawn is not None else None

    def _replace(self, place: _Place) -> None:
        # Written before the source goes: so a selection that ends with the source ends with the picture.
        end = place.position + place.length
        cursor = QTextCursor(self._document)
        cursor.beginEditBlock()
        cursor.setPosition(end)
        cursor.insertText(OBJECT, place.char)
        cursor.setPosition(place.position)
        cursor.setPosition(end, QTextCursor.MoveMode.KeepAnchor)
        cursor.removeSelectedText()
        cursor.endEditBlock()
        for places in self._waiting.values():
            for other in places:
                if other.position >= end:
                    other.position += 1 - place.length
        self.moved.emit(end, 1 - place.length)
