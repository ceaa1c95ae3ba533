"""A small button with only an icon, and a tooltip and accessible name."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QPaintEvent
from PySide6.QtWidgets import QToolButton, QWidget

from app.icons import icon

ICON_PX = 15
SIDE_PX = 25


class IconButton(QToolButton):
    """Drawn in the muted colour; `shy` ones are drawn only while their row is hovered or they have the focus."""

    def __init__(self, name: str, words: str, do: Callable[[], None], parent: QWidget) -> None:
        super().__init__(parent)
        self.is_shy = False
        self.setProperty("kind", "small")
        self.setIconSize(QSize(ICON_PX, ICON_PX))
        self.setFixedSize(SIDE_PX, SIDE_PX)
        self.setAutoRaise(True)
        self.setToolTip(words)
        self.setAccessibleName(words)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.clicked.connect(lambda: do())
        self.setIcon(icon(name, "muted"))

    def set_icon(self, name: str, words: str) -> None:
        """Change icon and text, such as to a tick after copying."""
        self.setToolTip(words)
        self.setAccessibleName(words)
        self.setIcon(icon(name, "muted"))

    def paintEvent(self, event: QPaintEvent) -> None:
        row = self.parentWidget()
        if self.is_shy and not self.hasFocus() and row is not None and not row.underMouse():
            return
        super().paintEvent(event)
