"""A calm line across the page: an icon, a sentence, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QIcon
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QPushButton, QWidget

from app.icons import icon
from app.theme import Theme, ThemeController

Kind = Literal["info", "warning", "danger"]
ICON_PX = 20


class Banner(QFrame):
    """Hidden until `tell`; its colour follows the theme, its meaning is in icon and words."""

    def __init__(self, kind: Kind, theme: ThemeController, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._kind = kind
        self.setProperty("banner", kind)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._mark = QLabel(self)
        self._text = QLabel(self)
        self._text.setWordWrap(True)
        self._text.setTextFormat(Qt.TextFormat.PlainText)
        self._text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._row = QHBoxLayout(self)
        self._row.setContentsMargins(16, 10, 16, 10)
        self._row.setSpacing(12)
        self._row.addWidget(self._mark)
        self._row.addWidget(self._text, 1)
        theme.changed.connect(self._apply)
        self._apply(theme.theme)
        self.hide()

    @property
    def text(self) -> str:
        """The sentence now shown."""
        return self._text.text()

    def add_action(self, label: str, do: Callable[[], None], *, kind: str = "") -> QPushButton:
        """A button at the end of the line."""
        button = QPushButton(label, self)
        button.setProperty("kind", kind)
        button.clicked.connect(lambda: do())
        self._row.addWidget(button)
        return button

    def tell(self, text: str) -> None:
        """Shows `text`."""
        self._text.setText(text)
        self.setAccessibleName(text)
        self.show()

    def _apply(self, theme: Theme) -> None:
        name, colour = ("info", theme.accent_text) if self._kind == "info" else ("warning", theme.danger)
        mark: QIcon = icon(name, theme, colour)
        self._mark.setPixmap(mark.pixmap(QSize(ICON_PX, ICON_PX), self.devicePixelRatioF()))
