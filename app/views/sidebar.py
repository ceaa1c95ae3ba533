"""The sidebar: where one can go, and what the machine holds."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.icons import icon, logo
from app.theme import BODY_PX, Theme, ThemeController
from app.views.machine_footer import MachineFooter

WIDTH_PX = 208
ICON_PX = 18
LOGO_PX = 24


class Sidebar(QWidget):
    """Signals: `page_chosen(int)`, an index into `pages`."""

    page_chosen = Signal(int)

    def __init__(self, theme: ThemeController, footer: MachineFooter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("pane", "surface")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setAccessibleName(self.tr("Navigation"))
        self._theme = theme
        self._mark = QLabel(self)
        name = QLabel("Switchyard", self)
        name.setProperty("role", "title")
        head = QHBoxLayout()
        head.setContentsMargins(10, 0, 0, 0)
        head.setSpacing(8)
        head.addWidget(self._mark)
        head.addWidget(name, 1)

        column = QVBoxLayout(self)
        column.setContentsMargins(12, 18, 12, 14)
        column.setSpacing(4)
        column.addLayout(head)
        column.addSpacing(14)
        self._group = QButtonGroup(self)
        self._icons: list[tuple[QPushButton, str]] = []
        for index, (icon_name, label) in enumerate(self._pages()):
            column.addWidget(self._button(index, icon_name, label))
        column.addStretch(1)
        column.addWidget(footer)
        self._group.idClicked.connect(self.page_chosen)
        theme.changed.connect(self._apply)
        self._apply(theme.theme)

    def choose(self, index: int) -> None:
        """Marks the page as the one shown; emits nothing."""
        self._group.button(index).setChecked(True)

    def has_focus(self) -> bool:
        """Whether a button of the sidebar has the focus."""
        return any(button.hasFocus() for button in self._group.buttons())

    def button(self, index: int) -> QPushButton:
        """The button of a page, for focus and tests."""
        found = self._group.button(index)
        if not isinstance(found, QPushButton):
            raise IndexError(index)
        return found

    def _pages(self) -> tuple[tuple[str, str], ...]:
        return (
            ("chat", self.tr("Chat")),
            ("batch", self.tr("Batch")),
            ("monitor", self.tr("Monitor")),
            ("tune", self.tr("Tune")),
            ("models", self.tr("Models")),
            ("settings", self.tr("Settings")),
        )

    def _button(self, index: int, icon_name: str, label: str) -> QPushButton:
        button = QPushButton(f" {label}", self)
        button.setCheckable(True)
        button.setProperty("kind", "navigation")
        button.setAccessibleName(label)
        keys = QKeySequence(f"Ctrl+{index + 1}")
        button.setToolTip(keys.toString(QKeySequence.SequenceFormat.NativeText))
        button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        QShortcut(keys, self, lambda: self._go(index))
        self._group.addButton(button, index)
        self._icons.append((button, icon_name))
        return button

    def _go(self, index: int) -> None:
        self.choose(index)
        self.page_chosen.emit(index)

    def _apply(self, theme: Theme) -> None:
        self.setFixedWidth(round(WIDTH_PX * (0.4 + 0.6 * self._theme.font_px / BODY_PX)))
        self._mark.setPixmap(logo(theme).pixmap(QSize(LOGO_PX, LOGO_PX), self.devicePixelRatioF()))
        side = round(ICON_PX * self._theme.font_px / BODY_PX)
        for button, name in self._icons:
            button.setIconSize(QSize(side, side))
            button.setIcon(icon(name, theme, theme.muted, theme.accent_text))
