"""The list of keyboard shortcuts: the current page's, and global ones."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFrame, QGridLayout, QLabel, QScrollArea, QVBoxLayout, QWidget

from app.widgets.shortcuts import Key


class ShortcutsDialog(QDialog):
    """Shows the shortcuts by group; empty groups are left out."""

    def __init__(self, groups: Sequence[tuple[str, Sequence[Key]]], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Keyboard shortcuts"))
        listed = QWidget(self)
        grid = QGridLayout(listed)
        grid.setContentsMargins(0, 0, 12, 0)
        grid.setHorizontalSpacing(24)
        grid.setVerticalSpacing(6)
        grid.setColumnStretch(1, 1)
        for name, keys in groups:
            if not keys:
                continue
            heading = QLabel(name, listed)
            heading.setProperty("role", "heading")
            heading.setContentsMargins(0, 8 if grid.rowCount() > 1 else 0, 0, 2)
            grid.addWidget(heading, grid.rowCount(), 0, 1, 2)
            for pressed, words in keys:
                row = grid.rowCount()
                key, what = QLabel(pressed, listed), QLabel(words, listed)
                what.setProperty("role", "secondary")
                what.setWordWrap(True)
                grid.addWidget(key, row, 0, Qt.AlignmentFlag.AlignTop)
                grid.addWidget(what, row, 1)
        grid.setRowStretch(grid.rowCount(), 1)
        scroll = QScrollArea(self)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setAccessibleName(self.windowTitle())
        scroll.setWidget(listed)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close, self)
        buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 20, 20, 20)
        column.setSpacing(16)
        column.addWidget(scroll, 1)
        column.addWidget(buttons)
        wanted = listed.sizeHint()
        room = parent.window().size() if parent is not None else wanted
        wide, high = max(460, wanted.width() + 60), wanted.height() + 120
        self.resize(min(wide, room.width() - 40), min(high, room.height() - 40))
