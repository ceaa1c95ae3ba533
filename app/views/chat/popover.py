"""A small card that opens above a button and closes with Esc or a click elsewhere."""

from __future__ import annotations

from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QFrame, QLabel, QVBoxLayout, QWidget

GAP = 8


class Popover(QFrame):
    """Its content goes into `column`."""

    def __init__(self, title: str, parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Popup)
        self.setObjectName("popover")
        self.setAccessibleName(title)
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(16, 14, 16, 16)
        self.column.setSpacing(10)
        heading = QLabel(title, self)
        heading.setProperty("role", "heading")
        self.column.addWidget(heading)

    def open_above(self, button: QWidget) -> None:
        """Show it above `button`, or below where there is no room."""
        self.adjustSize()
        at = button.mapToGlobal(QPoint(0, -self.height() - GAP))
        screen = button.screen().availableGeometry()
        if at.y() < screen.top():
            at = button.mapToGlobal(QPoint(0, button.height() + GAP))
        at.setX(max(screen.left(), min(at.x(), screen.right() - self.width())))
        at.setY(max(screen.top(), min(at.y(), screen.bottom() - self.height())))
        self.move(at)
        self.show()
