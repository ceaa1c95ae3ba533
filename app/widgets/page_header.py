"""The line at the top of a page: its title and its actions."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QSize, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QVBoxLayout, QWidget

HEIGHT_PX = 56
SIDE_PX = 20
GAP_PX, NARROW_GAP_PX = 12, 6


class PageHeader(QWidget):
    """Title on the left; `row` takes further widgets on the right.

    If they do not fit, the widget of `set_middle` moves to a line of its own, and then the title, which the sidebar
    shows too, is elided.
    """

    def __init__(self, title: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("pane", "surface")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._middle: QWidget | None = None
        self._middle_stretch = 0
        self._least_middle_px = 0
        self._is_below = False
        self.title = QLabel(title, self)
        self.title.setProperty("role", "title")
        self.row = QHBoxLayout()
        self.row.setContentsMargins(SIDE_PX, 0, SIDE_PX, 0)
        self.row.setSpacing(GAP_PX)
        self.row.addWidget(self.title, 1)
        self._below = QHBoxLayout()
        self._below.setContentsMargins(SIDE_PX, 0, SIDE_PX, 0)
        line = QFrame(self)
        line.setProperty("line", "true")
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addStretch(1)  # buttons do not grow vertically: without this, the line would be centred
        column.addLayout(self.row)
        column.addLayout(self._below)
        column.addStretch(1)
        column.addWidget(line)
        self.setMinimumHeight(HEIGHT_PX)

    def set_middle(self, widget: QWidget, *, least_px: int = 0, stretch: int = 0) -> None:
        """Sets the widget beside the title, shown there if it fits, or if `least_px` fit and it can be elided."""
        self._middle, self._middle_stretch, self._least_middle_px = widget, stretch, least_px
        self.row.setStretch(0, 0)
        self.row.insertWidget(1, widget, stretch, Qt.AlignmentFlag.AlignVCenter)
        if not stretch:
            self.row.insertStretch(2, 1)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def event(self, event: QEvent) -> bool:
        handled = super().event(event)
        if event.type() == QEvent.Type.LayoutRequest:
            self._fit()
        return handled

    def minimumSizeHint(self) -> QSize:
        # However wide the buttons are, the page may become narrower: `_fit` then moves some.
        return QSize(0, super().minimumSizeHint().height())

    def _fit(self) -> None:
        middle = self._middle
        if middle is None:
            return
        widgets = [item.widget() for at in range(self.row.count()) if (item := self.row.itemAt(at)) is not None]
        others = [one for one in widgets if one is not None and one not in (middle, self.title) and not one.isHidden()]
        room = self.width() - 2 * SIDE_PX
        title = self.title.sizeHint().width()
        buttons = sum(one.sizeHint().width() + GAP_PX for one in others)
        wanted = middle.sizeHint().width()
        wanted = min(wanted, self._least_middle_px) if self._least_middle_px else wanted
        below = not middle.isHidden() and title + GAP_PX + wanted + buttons > room
        tight = title + buttons > room
        if below != self._is_below:
            self._is_below = below
            if below:
                self.row.removeWidget(middle)
                self._below.addWidget(middle, 1, Qt.AlignmentFlag.AlignVCenter)
                if not self._middle_stretch:
                    self._below.setAlignment(middle, Qt.AlignmentFlag.AlignLeft)
            else:
                self._below.removeWidget(middle)
                self.row.insertWidget(1, middle, self._middle_stretch, Qt.AlignmentFlag.AlignVCenter)
            self.row.setStretch(0, 1 if below else 0)
            side = NARROW_GAP_PX if below else 0
            self._below.setContentsMargins(SIDE_PX, 0, SIDE_PX, side)
            self.row.setContentsMargins(SIDE_PX, side, SIDE_PX, side)
        spacing = NARROW_GAP_PX if tight else GAP_PX
        if self.row.spacing() != spacing:  # setting it always invalidates the layout
            self.row.setSpacing(spacing)
        self.title.setVisible(title + buttons - (GAP_PX - NARROW_GAP_PX) * len(others) <= room)
