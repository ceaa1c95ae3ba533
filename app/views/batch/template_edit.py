"""The template editor, with columns in another colour."""

from __future__ import annotations

import re

from PySide6.QtCore import QEvent, QSignalBlocker, QSize
from PySide6.QtGui import QFont, QSyntaxHighlighter, QTextCharFormat, QTextDocument
from PySide6.QtWidgets import QWidget

from app.theme import themed
from app.widgets.text_box import TextBox

_PLACE = re.compile(r"\{\{\s*(.+?)\s*\}\}")
LINES = 4


class _Places(QSyntaxHighlighter):
    def __init__(self, document: QTextDocument) -> None:
        super().__init__(document)
        self.columns: tuple[str, ...] = ()
        self.known, self.unknown = QTextCharFormat(), QTextCharFormat()

    def highlightBlock(self, text: str) -> None:
        for match in _PLACE.finditer(text):
            look = self.known if match[1] in self.columns else self.unknown
            self.setFormat(match.start(), match.end() - match.start(), look)


class TemplateEdit(TextBox):
    """`{{column}}` is coloured; an unknown column is also underlined."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTabChangesFocus(True)
        self._places = _Places(self.document())
        self._apply()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            with QSignalBlocker(self):  # the text is the same
                self._apply()

    def set_columns(self, columns: tuple[str, ...]) -> None:
        """Sets the known columns."""
        self._places.columns = columns
        self._places.rehighlight()

    def insert_column(self, name: str) -> None:
        """Inserts a column at the cursor."""
        self.insertPlainText(f"{{{{{name}}}}}")
        self.setFocus()

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.fontMetrics().lineSpacing() * LINES + 24)

    def minimumSizeHint(self) -> QSize:
        return QSize(120, self.sizeHint().height())

    def _apply(self) -> None:
        places = self._places
        for look, colour in ((places.known, themed("accent_text")), (places.unknown, themed("danger"))):
            look.setForeground(colour)
            look.setFontWeight(QFont.Weight.DemiBold)
        places.unknown.setUnderlineStyle(QTextCharFormat.UnderlineStyle.SingleUnderline)
        places.unknown.setUnderlineColor(themed("danger"))
        places.rehighlight()
