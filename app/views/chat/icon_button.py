"""A small button that is only an icon, with words for those who cannot see it."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QPaintEvent
from PySide6.QtWidgets import QToolButton, QWidget

from app.icons import icon
from app.theme import Theme

ICON_PX = 15
SIDE_PX = 25


class IconButton(QToolButton):
    """Drawn in the muted colour; `shy` ones are drawn only while their row is pointed at or they have the focus."""

    def __init__(self, name: str, words: str, do: Callable[[], None], parent: QWidget, theme: Theme) -> None:
        super().__init__(parent)
        self._name = name
        self.is_shy = False
        self.setProperty("kind", "small")
        self.setIconSize(QSize(ICON_PX, ICON_PX))
        self.setFixedSize(SIDE_PX, SIDE_PX)
        self.setAutoRaise(True)
        self.setToolTip(words)
        self.setAccessibleName(words)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.clicked.connect(lambda: do())
        self.apply_theme(theme)

    def apply_theme(self, theme: Theme) -> None:
        """Draw the icon in the theme's colour."""
        self.setIcon(icon(self._name, theme, theme.muted))

    def set_icon(self, name: str, words: str, theme: Theme) -> None:
        """Become another button, such as a tick after copying."""
        self._name = name
        self.setToolTip(words)
        self.setAccessibleName(words)
        self.apply_theme(theme)

    def paintEvent(self, event: QPaintEvent) -> None:
        row = self.parentWidget()
        if self.is_shy and not self.hasFocus() and row is not None and not row.underMouse():
            return
        super().paintEvent(event)
