"""A card with a heading, something said beside it, and a body."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget


class Card(QFrame):
    """`body` takes what the card shows; `head` takes controls at the right of the heading."""

    def __init__(self, heading: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self.setAccessibleName(heading)
        self.heading = QLabel(heading, self)
        self.heading.setProperty("role", "heading")
        self.heading.setTextFormat(Qt.TextFormat.PlainText)
        self.aside = muted_label(self)
        self.head = QHBoxLayout()
        self.head.setSpacing(10)
        self.head.addWidget(self.heading)
        self.head.addWidget(self.aside, 1)
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(16, 14, 16, 16)
        self.body.setSpacing(10)
        self.body.addLayout(self.head)

    def set_heading(self, text: str) -> None:
        self.heading.setText(text)
        self.setAccessibleName(text)


def muted_label(parent: QWidget, text: str = "", *, role: str = "secondary") -> QLabel:
    """Quieter text that wraps and can be selected."""
    label = QLabel(text, parent)
    label.setProperty("role", role)
    label.setWordWrap(True)
    label.setTextFormat(Qt.TextFormat.PlainText)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    label.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
    return label


def warning_label(parent: QWidget) -> QLabel:
    """What is wrong, in a line that `tell` shows."""
    label = muted_label(parent)
    label.setProperty("tone", "warning")
    label.hide()
    return label


def tell(label: QLabel, text: str) -> None:
    """Shows a line that is there only while it has something to say."""
    label.setText(text)
    label.setAccessibleName(text)
    label.setVisible(bool(text))
