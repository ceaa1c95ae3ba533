"""Mouse selection across the panes of one answer, each of which can only select within itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QEvent, QObject, QPoint, Qt
from PySide6.QtGui import QMouseEvent
from PySide6.QtWidgets import QScrollArea, QWidget

from app.widgets.markdown_view.document_pane import DocumentPane


@dataclass(frozen=True, slots=True)
class _Origin:
    browser: DocumentPane
    position: int


class CrossSelection(QObject):
    """Watches the panes and extends a drag that leaves its first pane over the panes between."""

    def __init__(self, view: QWidget, browsers: Callable[[], Sequence[DocumentPane]]) -> None:
        super().__init__(view)
        self._view = view
        self._browsers = browsers
        self._origin: _Origin | None = None
        self._reaches_out = False

    def watch(self, browser: DocumentPane) -> None:
        browser.viewport().installEventFilter(self)

    def clear(self, but: DocumentPane | None = None) -> None:
        for browser in self._browsers():
            if browser is not but:
                browser.clear_selection()

    def select_all(self) -> None:
        for browser in self._browsers():
            browser.select(0, -1)

    def text(self) -> str:
        """The selected text, panes separated by an empty line."""
        return "\n\n".join(text for browser in self._browsers() if (text := browser.selected_text()))

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if not isinstance(event, QMouseEvent) or not isinstance(watched, QWidget):
            return False
        browser = watched.parent()
        if not isinstance(browser, DocumentPane):
            return False
        if event.type() == QEvent.Type.MouseButtonPress and event.button() == Qt.MouseButton.LeftButton:
            self.clear(but=browser)
            position = browser.cursorForPosition(event.position().toPoint()).position()
            self._origin, self._reaches_out = _Origin(browser, position), False
        elif event.type() == QEvent.Type.MouseButtonRelease:
            self._origin = None
        elif event.type() == QEvent.Type.MouseMove and event.buttons() & Qt.MouseButton.LeftButton:
            return self._extend(browser, event.globalPosition().toPoint())
        return False

    def _extend(self, browser: DocumentPane, pointer: QPoint) -> bool:
        """Follows a drag; True if the pane itself must not handle it."""
        origin = self._origin
        if origin is None or origin.browser is not browser:
            return False
        self._scroll_to(pointer)
        browsers = list(self._browsers())
        if browser not in browsers:
            return False
        target = self._under(browsers, pointer)
        if target is browser:
            if self._reaches_out:
                self.clear(but=browser)
                self._reaches_out = False
            return False
        self._reaches_out = True
        first, last = browsers.index(browser), browsers.index(target)
        forward = last > first
        browser.select(origin.position, -1 if forward else 0)
        for index, other in enumerate(browsers):
            if min(first, last) < index < max(first, last):
                other.select(0, -1)
            elif index not in (first, last):
                other.clear_selection()
        there = target.cursorForPosition(target.viewport().mapFromGlobal(pointer)).position()
        target.select(0 if forward else -1, there)
        return True

    def _under(self, browsers: Sequence[DocumentPane], pointer: QPoint) -> DocumentPane:
        """The pane at the pointer's height, or the closest one."""

        def distance(browser: DocumentPane) -> int:
            y = browser.mapFromGlobal(pointer).y()
            return max(-y, y - browser.height(), 0)

        return min(browsers, key=distance)

    def _scroll_to(self, pointer: QPoint) -> None:
        """Keeps the pointer visible in the enclosing scroll area, if there is one."""
        area = self._view.parentWidget()
        while area is not None and not isinstance(area, QScrollArea):
            area = area.parentWidget()
        if area is not None and (content := area.widget()) is not None:
            at = content.mapFromGlobal(pointer)
            area.ensureVisible(area.horizontalScrollBar().value(), at.y(), 0, 8)
