"""The line at the top of a page: its title, and what can be done on it."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QVBoxLayout, QWidget

HEIGHT_PX = 56


class PageHeader(QWidget):
    """Title at the left; `row` takes further widgets at the right."""

    def __init__(self, title: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("pane", "surface")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.title = QLabel(title, self)
        self.title.setProperty("role", "title")
        self.row = QHBoxLayout()
        self.row.setContentsMargins(20, 0, 20, 0)
        self.row.setSpacing(12)
        self.row.addWidget(self.title, 1)
        line = QFrame(self)
        line.setProperty("line", "true")
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addStretch(1)  # buttons do not grow, so that the row would not fill the height and the line would rise
        column.addLayout(self.row)
        column.addStretch(1)
        column.addWidget(line)
        self.setMinimumHeight(HEIGHT_PX)
