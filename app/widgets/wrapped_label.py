"""Text that wraps; a word that is too long for its line, such as a path, is elided in the middle."""

from __future__ import annotations

import re

from PySide6.QtCore import QEvent, QSize, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QLabel, QWidget

from app.engine_words import said
from engine.common.plain_text import few_marks

_LEAST_CHARACTERS = 12
UNSPACED = "\u2e80-\u9fff\uff00-\uffef"
"""Characters of scripts that put no spaces between words, for a regular expression's set."""
_WORDS = re.compile(rf"[^\s/\\{UNSPACED}-]+[/\\-]?|[/\\-]")
"""Lines break at white space, in paths after a slash or a hyphen, and anywhere in Japanese and Chinese."""


_COMMANDS = (
    re.compile(r"(?: \(|, or run )`switchyard [^`]*`\)?"),
    re.compile(r"[:;] [^:;]*`switchyard .*?(?=\.(?:\s|$))", re.DOTALL),
)


def without_commands(text: str) -> str:
    """A message of the engine without what people at a terminal can run: a window has buttons for that."""
    for command in _COMMANDS:
        text = command.sub("", text)
    return text


class WrappedLabel(QLabel):
    """Selectable plain text; where a word is elided, the tooltip has the full text."""

    def __init__(self, text: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._whole = ""
        self._is_short = False
        self.setWordWrap(True)
        self.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.setText(text)

    def setText(self, text: str) -> None:
        self._whole = few_marks(said(without_commands(text)))
        self._fit()

    def text(self) -> str:
        """The full text, even if it does not fit."""
        return self._whole

    @property
    def shown(self) -> str:
        """What is painted."""
        return super().text()

    def minimumSizeHint(self) -> QSize:
        hint = super().minimumSizeHint()
        return QSize(min(hint.width(), _LEAST_CHARACTERS * self.fontMetrics().averageCharWidth()), hint.height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self._fit()

    def _fit(self) -> None:
        metrics, room = self.fontMetrics(), self.contentsRect().width()

        def shortened(word: re.Match[str]) -> str:
            return metrics.elidedText(word.group(), Qt.TextElideMode.ElideMiddle, room)

        placed = self.testAttribute(Qt.WidgetAttribute.WA_Resized)  # before that its width is not final
        shown = _WORDS.sub(shortened, self._whole) if placed else self._whole
        if shown != super().text():
            super().setText(shown)
        is_short = shown != self._whole
        if is_short or self._is_short:
            self.setToolTip(self._whole if is_short else "")
            self.setAccessibleName(self._whole)
        self._is_short = is_short
