"""A "?" that explains the widget beside it in a sentence or two."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QPoint, QSize, Qt
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QFrame, QLabel, QToolButton, QVBoxLayout, QWidget

MARK_PX = 18
_WIDTH_PX = 320
_GAP_PX = 4


class HelpMark(QToolButton):
    """Can be reached by keyboard; a screen reader reads the explanation as its description.

    Args:
        about: the name of what is explained.
        text: two sentences for a reader who is new to it.
    """

    def __init__(self, about: str, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._about, self._explanation = about, text
        self._bubble: HelpBubble | None = None
        self.setText("?")
        self.setProperty("kind", "help")
        self.setFixedSize(QSize(MARK_PX, MARK_PX))
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setToolTip(text)
        self.setAccessibleName(QCoreApplication.translate("HelpMark", "What is “{0}”?").format(about))
        self.setAccessibleDescription(text)
        self.clicked.connect(self.explain)

    @property
    def explanation(self) -> str:
        """The text."""
        return self._explanation

    @property
    def bubble(self) -> HelpBubble | None:
        """The open bubble; None if it is closed."""
        return self._bubble if self._bubble is not None and self._bubble.isVisible() else None

    def explain(self) -> None:
        """Opens the explanation below; Esc, Enter, Space or a click anywhere closes it."""
        if self._bubble is None:
            self._bubble = HelpBubble(self._about, self._explanation, self)
        self._bubble.open_below(self)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.explain()
        else:
            super().keyPressEvent(event)


class HelpBubble(QFrame):
    """A heading and a text in a small window of its own."""

    def __init__(self, about: str, text: str, parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Popup)
        self.setProperty("help", "true")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setAccessibleName(f"{about}. {text}")
        heading, said = QLabel(about, self), QLabel(text, self)
        heading.setProperty("role", "heading")
        for label in (heading, said):
            label.setWordWrap(True)
        column = QVBoxLayout(self)
        column.setContentsMargins(14, 10, 14, 12)
        column.setSpacing(4)
        column.addWidget(heading)
        column.addWidget(said)
        self.setFixedWidth(_WIDTH_PX)

    def open_below(self, widget: QWidget) -> None:
        """Below the widget, or above if there is no room; always within the screen."""
        self.ensurePolished()
        self.resize(_WIDTH_PX, self.heightForWidth(_WIDTH_PX))
        room = widget.screen().availableGeometry()
        at = widget.mapToGlobal(QPoint(0, widget.height() + _GAP_PX))
        if at.y() + self.height() > room.bottom():
            at.setY(widget.mapToGlobal(QPoint(0, 0)).y() - self.height() - _GAP_PX)
        at.setX(max(room.left(), min(at.x(), room.right() - self.width())))
        self.move(at)
        self.show()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Escape, Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self.close()
        else:
            super().keyPressEvent(event)
