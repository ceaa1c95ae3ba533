"""A small card in the window that opens at a button; Esc, a click elsewhere or what goes on elsewhere closes it."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QPoint, QSize, Qt
from PySide6.QtGui import QFocusEvent, QKeyEvent, QMouseEvent
from PySide6.QtWidgets import QApplication, QFrame, QWidget

from app.widgets.scaffold import scroll_area, text_label, vbox

GAP = 8


class Popover(QFrame):
    """Contents go into `column`.  It is a child of `page`, so that it needs no window of its own."""

    def __init__(self, title: str, page: QWidget) -> None:
        super().__init__(page)
        self._button: QWidget | None = None
        self.least_width = 0
        """Where the page has room for it."""
        self.setObjectName("popover")
        self.setAccessibleName(title)
        self._content = QWidget(self)
        self._scroll = scroll_area(self._content, self)
        vbox(self._scroll, into=self, gap=-1)
        heading = text_label(self._content, title, role="heading")
        self.column = vbox(heading, into=self._content, margins=(16, 14, 16, 16), gap=10)
        self.hide()

    def open_at(self, button: QWidget) -> None:
        """Show it above `button`, or below one that is near the top, within the page."""
        page = self.parentWidget()
        if page is None:
            return
        self._button = button
        self._place()
        self.show()
        self._place()  # again, as only visible widgets have their final sizes
        self.raise_()
        application = QApplication.instance()
        if application is not None:
            application.installEventFilter(self)

    def _place(self) -> None:
        """Beside its button, within the page; it scrolls if there is too little room."""
        page = self.parentWidget()
        if page is None or self._button is None:
            return
        frame = 2 * max(1, self.frameWidth())
        wanted = self._content.sizeHint().expandedTo(QSize(self.least_width, 0)) + QSize(frame, frame)
        top = self._button.mapTo(page, QPoint(0, 0))
        is_below = top.y() < page.height() - top.y() - self._button.height()
        under = top.y() + self._button.height() + GAP
        size = wanted.boundedTo(page.size() - QSize(2 * GAP, GAP + (under if is_below else GAP)))
        bar = self._scroll.verticalScrollBar().sizeHint().width()
        if size.height() < wanted.height():
            size.setWidth(min(wanted.width() + bar, page.width() - 2 * GAP))
        self.resize(size)
        at = QPoint(top.x(), under if is_below else top.y() - size.height() - GAP)
        at.setX(max(GAP, min(at.x(), page.width() - size.width() - GAP)))
        at.setY(max(GAP, min(at.y(), page.height() - size.height() - GAP)))
        self.move(at)

    def close_and_return(self) -> None:
        had_focus = self.isAncestorOf(QApplication.focusWidget() or self)
        self.hide()
        if had_focus and self._button is not None:
            self._button.setFocus()

    def hideEvent(self, _event: QEvent) -> None:
        application = QApplication.instance()
        if application is not None:
            application.removeEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        page = self.parentWidget()
        if event.type() in (QEvent.Type.Resize, QEvent.Type.LayoutRequest) and watched in (page, self._content):
            self._place()
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
                # A click on its own button closes it without opening it again.
                return watched is self._button
        if isinstance(event, QFocusEvent) and event.type() == QEvent.Type.FocusIn and isinstance(watched, QWidget):
            # As a new chat's composer does, which the card would hide.  Lists of its own fields are other windows.
            is_moved = event.reason() == Qt.FocusReason.OtherFocusReason and watched.window() is self.window()
            if is_moved and watched is not self._button and watched is not self and not self.isAncestorOf(watched):
                self.hide()
        return False
