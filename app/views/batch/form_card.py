"""A card of the form for a new job."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QVBoxLayout, QWidget


class FormCard(QFrame):
    """A heading, then `column`; `head` takes what stands at the heading's right."""

    def __init__(self, heading: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self.setAccessibleName(heading)
        self.heading = QLabel(heading, self)
        self.heading.setProperty("role", "heading")
        self.head = QHBoxLayout()
        self.head.setSpacing(8)
        self.head.addWidget(self.heading)
        self.head.addStretch(1)
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(16, 14, 16, 16)
        self.column.setSpacing(10)
        self.column.addLayout(self.head)

    def words(self, text: str = "", *, warning: bool = False) -> QLabel:
        """A quieter line that wraps, added by whoever asks; one that warns is shown only with a text."""
        label = QLabel(text, self)
        label.setProperty("role", "secondary")
        label.setWordWrap(True)
        label.setTextFormat(Qt.TextFormat.PlainText)
        label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        if warning:
            label.setProperty("tone", "warning")
            label.hide()
        return label


def tell(label: QLabel, text: str) -> None:
    """Shows a line that is there only while it has something to say."""
    label.setText(text)
    label.setAccessibleName(text)
    label.setVisible(bool(text))
