"""The widget that shows one Markdown answer, also while it streams in."""

from __future__ import annotations

import time

from PySide6.QtCore import QEvent, QPoint, QRectF, QSize, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import (
    QColor,
    QContextMenuEvent,
    QFocusEvent,
    QGuiApplication,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import QMenu, QSizePolicy, QWidget

from app.theme import Theme, colours
from app.widgets.markdown_view.column import PaneColumn
from app.widgets.markdown_view.document_pane import DocumentPane
from app.widgets.markdown_view.plain_text import plain_text
from app.widgets.markdown_view.selection import CrossSelection
from app.widgets.markdown_view.stream_parser import StreamParser
from app.widgets.markdown_view.style import MAX_VISIBLE_DEPTH, Style

_SLICE_S = 0.012  # of work before other events are processed
_IDLE_SHARE = 4  # while streaming, the pause after an update is at least this many times its duration
_LEAST_PAUSE_S = 0.025  # shorter pauses are skipped


class MarkdownView(QWidget):
    """Shows an answer in Markdown; nothing in it is ever loaded, run or opened.

    Text streams in through `append_markdown` until `finish`; `set_markdown` shows a complete text.  It is drawn in
    time slices; `flush` draws everything at once.  The height follows from the width, so that the view fits in a
    scroll area without a scroll bar of its own.

    The mouse selects within a block and, dragged further, across blocks.  Ctrl+A selects the whole answer, Ctrl+C
    copies the selection as plain text or, without one, the whole answer as Markdown.  Tab stops are the answer,
    blocks with links, Copy buttons and code that scrolls sideways.

    Signals:
        link_activated: a link was clicked, or activated by keyboard; the owner decides whether to open it.
    """

    link_activated = Signal(QUrl)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._style = Style(self.theme(), self.font())
        self._source: list[str] = []
        self._parser = StreamParser()
        self._is_streaming = False
        self._must_recheck = False
        self._shows_focus = False
        self._heights: dict[int, int] = {}
        self._selection = CrossSelection(self, lambda: self._column.browsers())
        self._column = PaneColumn(self, self._watch)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._update)
        self._put_back = QTimer(self)
        self._put_back.setSingleShot(True)
        self._put_back.timeout.connect(self._place)
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setAccessibleName(self.tr("Answer"))

    def theme(self) -> Theme:
        """The colours to draw with."""
        return colours()

    # The text

    def show_growing(self, text: str, *, grows: bool) -> None:
        """Shows a text of which a beginning may be shown already; `grows` if there will be more of it.

        What was only appended is only appended here.
        """
        shown = self.markdown()
        if not text.startswith(shown) or (text and not shown and not grows):
            self.set_markdown("" if grows else text)
            shown = self.markdown()
        if text != shown:
            self.append_markdown(text[len(shown) :])
        if not grows and self._is_streaming:
            self.finish()

    def set_markdown(self, text: str) -> None:
        """Shows a complete text instead of the present one."""
        self._restart()
        self._take(text)
        self.finish()

    def append_markdown(self, text: str) -> None:
        """Appends text; resumes streaming if the text was complete."""
        if not self._is_streaming:
            so_far = self.markdown()
            self._restart()
            if so_far:
                self._take(so_far)
            self._is_streaming = True
        self._take(text)
        if not self._timer.isActive():
            self._timer.start(0)

    def finish(self) -> None:
        """Marks the text as complete and hides the cursor; no effect on a complete text."""
        self._is_streaming = False
        self._timer.start(0)

    def flush(self) -> None:
        """Draws all pending text now."""
        self._timer.stop()
        while not self._update_slice(float("inf")):
            pass

    def markdown(self) -> str:
        """The source, unchanged."""
        if len(self._source) > 1:
            self._source = ["".join(self._source)]
        return self._source[0] if self._source else ""

    def plain_text(self) -> str:
        """The answer without markup."""
        while self._parser.advance():
            pass
        return plain_text([*self._parser.finished, *self._parser.tail()])

    def copy_all(self) -> None:
        """Copies the whole answer as Markdown."""
        # As text instead of a custom QMimeData: the clipboard may outlive the interpreter that such an object needs.
        QGuiApplication.clipboard().setText(self.markdown())

    def select_all(self) -> None:
        self.flush()
        self._selection.select_all()

    def selected_text(self) -> str:
        """The selection as plain text; it may span several blocks."""
        return self._selection.text()

    # Geometry

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        if width not in self._heights:
            if len(self._heights) > 8:
                self._heights.clear()
            height = self._column.height_for(width, self._style)
            self._heights[width] = max(height, self._line_height())
            if width != self.width():
                # The view may never get this width: restore the layout for the present one.
                self._put_back.start()
        return self._heights[width]

    def sizeHint(self) -> QSize:
        width = self.width() if self.testAttribute(Qt.WidgetAttribute.WA_Resized) else 640
        return QSize(width, self.heightForWidth(width))

    def minimumSizeHint(self) -> QSize:
        return QSize(self._style.px(8), self._line_height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        if event.size().width() != event.oldSize().width():
            self._place()

    # Private

    @property
    def column(self) -> PaneColumn:
        return self._column

    @property
    def parser(self) -> StreamParser:
        return self._parser

    def _line_height(self) -> int:
        return self._style.px(1.5)

    def _restart(self) -> None:
        self._timer.stop()
        self._source = []
        self._parser = StreamParser()
        self._is_streaming = False
        self._must_recheck = True

    def _take(self, text: str) -> None:
        self._source.append(text)
        self._parser.append(text)

    def _update(self) -> None:
        started = time.perf_counter()
        is_complete = self._update_slice(started + _SLICE_S)
        took = time.perf_counter() - started
        if not is_complete:
            self._timer.start(1)
        elif self._is_streaming and took * _IDLE_SHARE > _LEAST_PAUSE_S:
            # Appending during this pause does not shorten it, finishing does.
            self._timer.start(round(took * _IDLE_SHARE * 1000))

    def _update_slice(self, deadline: float) -> bool:
        """Parses and draws until the deadline; True when the answer is up to date."""
        may_have_more = True
        while may_have_more and time.perf_counter() < deadline:
            may_have_more = self._parser.advance()
        if not may_have_more and not self._is_streaming and not self._parser.is_finished:
            self._parser.finish()
            self._must_recheck = True
        tail = [] if may_have_more else self._parser.tail()
        is_drawn = self._column.update(self._parser.finished, tail, self._style, deadline, recheck=self._must_recheck)
        self._must_recheck = False
        self._move_stream_cursor()
        self._place()
        if is_drawn and not may_have_more and not self._is_streaming:
            self.setAccessibleDescription(self.plain_text())
        return is_drawn and not may_have_more

    def _place(self) -> None:
        """Lays the panes out for the present width, and updates the geometry if the height changed."""
        self._put_back.stop()
        before = self._heights.get(self.width())
        height = max(self._column.place(self.width(), self._style), self._line_height())
        if before != height:
            self._heights = {self.width(): height}
        if before != height or self.height() != height:
            # A minimum as well as a hint: a parent layout that is one pass behind would otherwise squeeze the answer
            # and cut off its last lines.
            self.setMinimumHeight(height)
            self.updateGeometry()
        self.update()

    def _restyle(self) -> None:
        self.ensurePolished()
        style = Style(self.theme(), self.font())
        if not style.same_as(self._style):
            self._style = style
            self._heights.clear()
            self._column.clear()
            self._timer.start(0)
            self._update()

    def _watch(self, browser: DocumentPane) -> None:
        browser.link_clicked.connect(self.link_activated)
        browser.copy_requested.connect(self._copy_selection)
        browser.select_all_requested.connect(self.select_all)
        browser.menu_requested.connect(self._show_menu)
        self._selection.watch(browser)

    def _copy_selection(self) -> None:
        text = self.selected_text()
        if text:
            QGuiApplication.clipboard().setText(text)

    def _move_stream_cursor(self) -> None:
        browsers = self._column.browsers()
        colour = QColor(colours().accent) if self._is_streaming else None
        for browser in browsers[-3:-1]:
            browser.set_stream_cursor(None)
        if browsers:
            browsers[-1].set_stream_cursor(colour)

    def _show_menu(self, global_position: QPoint, link: str = "") -> None:
        menu = self.build_menu(link)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(global_position)

    def build_menu(self, link: str) -> QMenu:
        """The context menu; `link` is the clicked link's address, or empty."""
        menu = QMenu(self)
        copy = menu.addAction(self.tr("Copy"), self._copy_selection)
        copy.setEnabled(bool(self.selected_text()))
        if link:
            menu.addAction(self.tr("Copy link"), lambda: QGuiApplication.clipboard().setText(link))
        menu.addAction(self.tr("Select all"), self.select_all)
        menu.addSeparator()
        menu.addAction(
            self.tr("Copy all as plain text"), lambda: QGuiApplication.clipboard().setText(self.plain_text())
        )
        menu.addAction(self.tr("Copy all as Markdown"), self.copy_all)
        return menu

    # Events

    def changeEvent(self, event: QEvent) -> None:
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self._restyle()
        super().changeEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.SelectAll):
            self.select_all()
        elif event.matches(QKeySequence.StandardKey.Copy):
            self._copy_selection() if self.selected_text() else self.copy_all()
        else:
            super().keyPressEvent(event)

    def focusInEvent(self, event: QFocusEvent) -> None:
        by_keyboard = (Qt.FocusReason.TabFocusReason, Qt.FocusReason.BacktabFocusReason)
        self._shows_focus = event.reason() in by_keyboard
        super().focusInEvent(event)

    def focusOutEvent(self, event: QFocusEvent) -> None:
        self._shows_focus = False
        super().focusOutEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        self._show_menu(event.globalPos())

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(colours().border))
        for bar in self._quote_bars():
            painter.drawRoundedRect(bar, 1.5, 1.5)
        if self._is_streaming and not self._column.browsers():
            painter.setBrush(QColor(colours().accent))
            painter.drawRoundedRect(QRectF(0, 2, 8, self._style.px(1.15)), 2, 2)
        if self._shows_focus:
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(QPen(QColor(colours().accent), 2))
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(1, 1, -1, -1), 6, 6)
        painter.end()

    def _quote_bars(self) -> list[QRectF]:
        """One bar per block quote, beside all its panes."""
        bars: list[QRectF] = []
        open_bars: dict[str, QRectF] = {}
        for pane in self._column.panes:
            containers = pane.containers[:MAX_VISIBLE_DEPTH]
            inside = {containers[:end] for end in range(1, len(containers) + 1) if containers[end - 1] == "q"}
            bars += [open_bars.pop(gone) for gone in open_bars.keys() - inside]
            for quote in inside:
                top = open_bars[quote].top() if quote in open_bars else pane.y()
                left = self._style.left_of(quote[:-1])
                open_bars[quote] = QRectF(left, top, 3, pane.y() + pane.height() - top)
        return [*bars, *open_bars.values()]
