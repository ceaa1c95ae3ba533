"""A small card inside the window that opens above a button and closes with Esc or a click elsewhere."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QPoint, Qt
from PySide6.QtGui import QKeyEvent, QMouseEvent
from PySide6.QtWidgets import QApplication, QFrame, QLabel, QVBoxLayout, QWidget

GAP = 8


class Popover(QFrame):
    """Its content goes into `column`.  It lies over `page`, so that it needs no window of its own."""

    def __init__(self, title: str, page: QWidget) -> None:
        super().__init__(page)
        self._button: QWidget | None = None
        self.setObjectName("popover")
        self.setAccessibleName(title)
        self.column = QVBoxLayout(self)
        self.column.setContentsMargins(16, 14, 16, 16)
        self.column.setSpacing(10)
        heading = QLabel(title, self)
        heading.setProperty("role", "heading")
        self.column.addWidget(heading)
        self.hide()

    def open_above(self, button: QWidget) -> None:
        """Show it above `button`, within the page."""
        page = self.parentWidget()
        if page is None:
            return
        self._button = button
        self.adjustSize()
        at = button.mapTo(page, QPoint(0, -self.height() - GAP))
        at.setX(max(GAP, min(at.x(), page.width() - self.width() - GAP)))
        at.setY(max(GAP, at.y()))
        self.move(at)
        self.show()
        self.raise_()
        application = QApplication.instance()
        if application is not None:
            application.installEventFilter(self)

    def close_and_return(self) -> None:
        """Close it, and give the focus back to the button."""
        had_focus = self.isAncestorOf(QApplication.focusWidget() or self)
        self.hide()
        if had_focus and self._button is not None:
            self._button.setFocus()

    def hideEvent(self, _event: QEvent) -> None:
        application = QApplication.instance()
        if application is not None:
            application.removeEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.key() == Qt.Key.Key_Escape and isinstance(watched, QWidget):
            if event.type() == QEvent.Type.ShortcutOverride:
                event.accept()
                return True
            if event.type() == QEvent.Type.KeyPress:
                self.close_and_return()
                return True
        if isinstance(event, QMouseEvent) and event.type() == QEvent.Type.MouseButtonPress:
            inside = isinstance(watched, QWidget) and (watched is self or self.isAncestorOf(watched))
            if isinstance(watched, QWidget) and not inside:
                self.hide()
                # A click on its own button closes it and does not open it again.
                return watched is self._button
        return False
