"""A card with a heading, something said beside it, and a body."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QVBoxLayout, QWidget


class MonitorCard(QFrame):
    """`body` takes what the card shows; `head` takes controls at the right of the heading."""

    def __init__(self, heading: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self.setAccessibleName(heading)
        self.heading = QLabel(heading, self)
        self.heading.setProperty("role", "heading")
        self.aside = QLabel(self)
        self.aside.setProperty("role", "secondary")
        self.aside.setTextFormat(Qt.TextFormat.PlainText)
        self.head = QHBoxLayout()
        self.head.setSpacing(10)
        self.head.addWidget(self.heading)
        self.head.addWidget(self.aside, 1)
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(16, 14, 16, 14)
        self.body.setSpacing(10)
        self.body.addLayout(self.head)


def secondary(text: str, parent: QWidget) -> QLabel:
    """A muted line of text that wraps."""
    label = QLabel(text, parent)
    label.setProperty("role", "secondary")
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setWordWrap(True)
    return label
