"""A card with a heading, a note beside it, and a body."""

from __future__ import annotations

from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget

from app.widgets.help_mark import HelpMark
from app.widgets.wrapped_label import WrappedLabel

LEAST_CAPTION_CHARACTERS = 24


class Card(QFrame):
    """`body` takes the contents; `head` takes controls to the right of the heading."""

    def __init__(self, heading: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self.setAccessibleName(heading)
        self.heading = QLabel(heading, self)
        self.heading.setProperty("role", "heading")
        self.caption = muted_label(self)
        self._is_below, self._caption_at = False, 0
        self.head = QHBoxLayout()
        self.head.setSpacing(10)
        self.head.addWidget(self.heading)
        self.head.addWidget(self.caption, 1)
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(16, 14, 16, 16)
        self.body.setSpacing(10)
        self.body.addLayout(self.head)

    def explain(self, text: str) -> None:
        """Adds a "?" beside the heading that explains the card."""
        self.help = HelpMark(self.heading.text(), text, self)
        self.head.insertWidget(1, self.help)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        """Moves the note below the heading where there is too little room beside it."""
        widgets = [item.widget() for at in range(self.head.count()) if (item := self.head.itemAt(at)) is not None]
        beside = [one for one in widgets if one is not None and one is not self.caption and not one.isHidden()]
        margins = self.body.contentsMargins()
        room = self.width() - margins.left() - margins.right()
        room -= sum(one.sizeHint().width() + self.head.spacing() for one in beside)
        metrics = self.caption.fontMetrics()
        advance, character = metrics.horizontalAdvance(self.caption.text()), metrics.averageCharWidth()
        needed = min(advance, LEAST_CAPTION_CHARACTERS * character)
        below = bool(self.caption.text()) and needed > room
        if below != self._is_below:
            self._is_below = below
            if below:
                self._caption_at = self.head.indexOf(self.caption)
                self.head.removeWidget(self.caption)
                self.head.insertStretch(self._caption_at, 1)  # keeps the controls at the right
                self.body.insertWidget(1, self.caption)
            else:
                self.body.removeWidget(self.caption)
                self.head.takeAt(self._caption_at)
                self.head.insertWidget(self._caption_at, self.caption, 1)

    def set_heading(self, text: str) -> None:
        self.heading.setText(text)
        self.setAccessibleName(text)


def muted_label(parent: QWidget, text: str = "", *, role: str = "secondary") -> QLabel:
    """Quieter text that wraps and can be selected."""
    label = WrappedLabel(text, parent)
    label.setProperty("role", role)
    label.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
    return label


def warning_label(parent: QWidget) -> QLabel:
    """A warning line, shown by `set_message`."""
    label = muted_label(parent)
    label.setProperty("tone", "warning")
    label.hide()
    return label


def set_message(label: QLabel, text: str) -> None:
    """Sets a line's text; the line is hidden while it is empty."""
    label.setText(text)
    label.setAccessibleName(text)
    label.setVisible(bool(text))
