"""A card with a heading, something said beside it, and a body."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget

from app.widgets.help_mark import HelpMark
from app.widgets.wrapped_label import WrappedLabel

LEAST_ASIDE_CHARACTERS = 24


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
        self._is_below, self._aside_at = False, 0
        self.head = QHBoxLayout()
        self.head.setSpacing(10)
        self.head.addWidget(self.heading)
        self.head.addWidget(self.aside, 1)
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(16, 14, 16, 16)
        self.body.setSpacing(10)
        self.body.addLayout(self.head)

    def explain(self, text: str) -> None:
        """Puts a "?" beside the heading that says what the card shows."""
        self.help = HelpMark(self.heading.text(), text, self)
        self.head.insertWidget(1, self.help)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        """What is said beside the heading stands below it where it would be squeezed there."""
        widgets = [item.widget() for at in range(self.head.count()) if (item := self.head.itemAt(at)) is not None]
        beside = [one for one in widgets if one is not None and one is not self.aside and not one.isHidden()]
        margins = self.body.contentsMargins()
        room = self.width() - margins.left() - margins.right()
        room -= sum(one.sizeHint().width() + self.head.spacing() for one in beside)
        metrics = self.aside.fontMetrics()
        needed = min(metrics.horizontalAdvance(self.aside.text()), LEAST_ASIDE_CHARACTERS * metrics.averageCharWidth())
        below = bool(self.aside.text()) and needed > room
        if below != self._is_below:
            self._is_below = below
            if below:
                self._aside_at = self.head.indexOf(self.aside)
                self.head.removeWidget(self.aside)
                self.head.insertStretch(self._aside_at, 1)  # what stands at the right stays there
                self.body.insertWidget(1, self.aside)
            else:
                self.body.removeWidget(self.aside)
                self.head.takeAt(self._aside_at)
                self.head.insertWidget(self._aside_at, self.aside, 1)

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
