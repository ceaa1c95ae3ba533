"""The widget that shows one Markdown answer, also while it streams in."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from PySide6.QtCore import (
    QEvent,
    QMimeData,
    QPoint,
    QPointF,
    QRectF,
    QRegularExpression,
    QSize,
    Qt,
    QTimer,
    QUrl,
    Signal,
)
from PySide6.QtGui import (
    QColor,
    QContextMenuEvent,
    QDesktopServices,
    QFocusEvent,
    QGuiApplication,
    QHelpEvent,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
    QTextCharFormat,
    QTextCursor,
    QWheelEvent,
)
from PySide6.QtWidgets import (
    QFrame,
    QMenu,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QTextBrowser,
    QTextEdit,
    QToolTip,
    QWidget,
)

from app.services.background import timer
from app.theme import Theme, colours
from app.widgets.answer_text.blocks import CodeBlock, allowed_link
from app.widgets.answer_text.maths import OBJECT, SOURCE
from app.widgets.answer_text.paper import card_bottom, paint_behind, plain_text
from app.widgets.answer_text.parser import StreamParser
from app.widgets.answer_text.style import Style, mark_format
from app.widgets.answer_text.writer import CODE, DocumentWriter, InertDocument

_SLICE_S = 0.012  # of work before other events are processed
_IDLE_SHARE = 4  # while streaming, the pause after an update is at least this many times its duration
_LEAST_PAUSE_S = 0.025  # shorter pauses are skipped
_COPIED_MS = 2_000
_CURSOR_WIDTH = 8
_CURSOR_GAP = 3
_MOST_MATCHES = 1_000
_REFERENCE, _REFERENCES = QRegularExpression(r"\[[1-9]\d{0,2}(?:[,;–-] ?[1-9]\d{0,2})*\]"), "reference:"
_KEYS_THAT_SCROLL = frozenset(
    {Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_PageUp, Qt.Key.Key_PageDown, Qt.Key.Key_Home, Qt.Key.Key_End}
)
_KEYS_THAT_MOVE = _KEYS_THAT_SCROLL | {Qt.Key.Key_Left, Qt.Key.Key_Right}
_WITH_KEYS = Qt.TextInteractionFlag.TextBrowserInteraction | Qt.TextInteractionFlag.TextSelectableByKeyboard


@dataclass(frozen=True, slots=True)
class Match:
    start: int
    end: int


def _number_in(address: str) -> int:
    """Of a reference; 0 if it is the address of anything else."""
    found = re.fullmatch(f"{_REFERENCES}([0-9]+)", address)
    return int(found[1]) if found else 0


class CopyButton(QPushButton):
    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.code = ""
        self.setProperty("kind", "quiet")
        self.setProperty("compact", True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self._reset = timer(self, self._show_copy, _COPIED_MS, once=True)
        self.clicked.connect(self._copy)
        self._show_copy()

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self.code)
        self.setText(self.tr("Copied"))
        self.setAccessibleName(self.tr("Copied"))
        self._reset.start()

    def _show_copy(self) -> None:
        self.setText(self.tr("Copy"))
        self.setAccessibleName(self.tr("Copy code"))


def open_link(url: QUrl) -> None:
    """In the browser or mail program that people use."""
    if url.scheme() in ("http", "https", "mailto"):
        QDesktopServices.openUrl(url)


class AnswerView(QTextBrowser):
    """Shows an answer in Markdown, in one document; nothing in it is ever loaded, run or opened.

    Text streams in through `append_markdown` until `finish`; `set_markdown` shows a complete text.  It is written in
    time slices; `flush` writes everything at once.  The height follows from the width, so that the view fits in a
    scroll area without a scroll bar of its own.

    Ctrl+A selects the whole answer, the arrows with Shift select; Ctrl+C copies the selection as plain text or, without
    one, the whole answer as Markdown.  Tab stops are the answer, its links, and the buttons that copy code.

    Signals:
        link_activated: a link was clicked, or activated by keyboard; the owner decides whether to open it.
        reference_activated: likewise the number of a reference.
    """

    link_activated = Signal(QUrl)
    reference_activated = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("bare", True)  # see resources/themes/switchyard.qss
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.viewport().setAutoFillBackground(False)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)
        self.setOpenLinks(False)
        self.setOpenExternalLinks(False)
        self.setAcceptDrops(False)
        # The owner sets the line width, not the widget, which is resized only later.
        self.setLineWrapMode(QTextEdit.LineWrapMode.FixedPixelWidth)
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(self.tr("Answer"))
        self.anchorClicked.connect(self._on_anchor)
        self._style = Style(self.theme(), self.font())
        self._source: list[str] = []
        self._parser = StreamParser()
        self._buttons: list[CopyButton] = []
        self._matches: list[Match] = []
        self._references: dict[int, str] = {}
        self._heights: dict[int, int] = {}
        self._is_streaming = False
        self._must_recheck = False
        self._shows_focus = False
        self._least_height = 0  # while another style is written
        self._restored: tuple[int, int] | None = None
        self._begin_document()
        self._timer = QTimer(self, singleShot=True)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._update)
        self._put_back = timer(self, lambda: self._place(), once=True)

    def theme(self) -> Theme:
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
        self._restart()
        self._select(0, 0)
        self._take(text)
        self.finish()

    def set_references(self, titles: Mapping[int, str]) -> None:
        """Makes `[1]` and the like, once the text is complete, links to what has these numbers."""
        if dict(titles) != self._references:
            self._references = dict(titles)
            if not self._is_streaming and not self._timer.isActive():
                self._link_references()

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
        self._timer.stop()
        while not self._update_slice(float("inf")):
            pass

    def markdown(self) -> str:
        if len(self._source) > 1:
            self._source = ["".join(self._source)]
        return self._source[0] if self._source else ""

    def plain_text(self) -> str:
        self.flush()
        return self._text_between(0, self.document().characterCount())

    def copy_all(self) -> None:
        # As text instead of a custom QMimeData: the clipboard may outlive the interpreter that such an object needs.
        QGuiApplication.clipboard().setText(self.markdown())

    def select_all(self) -> None:
        self.flush()
        self.selectAll()

    def selected_text(self) -> str:
        cursor = self.textCursor()
        return self._text_between(cursor.selectionStart(), cursor.selectionEnd())

    @property
    def copy_buttons(self) -> list[CopyButton]:
        return list(self._buttons)

    @property
    def writer(self) -> DocumentWriter:
        return self._writer

    @property
    def parser(self) -> StreamParser:
        return self._parser

    # Finding

    def find_matches(self, text: str) -> list[Match]:
        self.flush()
        self._matches = []
        wanted = text.casefold()
        if wanted:
            whole = self.document().toRawText()
            # Case is folded letter by letter, so that places stay places.
            folded = "".join(letter if len(low := letter.casefold()) != 1 else low for letter in whole)
            at = folded.find(wanted)
            while at >= 0 and len(self._matches) < _MOST_MATCHES:
                self._matches.append(Match(_places(whole, at), _places(whole, at + len(wanted))))
                at = folded.find(wanted, at + len(wanted))
            at = whole.find(OBJECT)
            while at >= 0:
                start = _places(whole, at)
                cursor = QTextCursor(self.document())
                cursor.setPosition(start + 1)
                if wanted in str(cursor.charFormat().property(SOURCE) or "").casefold():
                    self._matches.append(Match(start, start + 1))
                at = whole.find(OBJECT, at + 1)
            self._matches.sort(key=lambda match: match.start)
        self._mark_matches(None)
        return list(self._matches)

    def show_match(self, number: int) -> None:
        self._mark_matches(number)
        cursor = QTextCursor(self.document())
        cursor.setPosition(self._matches[number].start)
        self._scroll_to(QRectF(self.cursorRect(cursor)).center().toPoint(), 60)

    def _mark_matches(self, current: int | None) -> None:
        marks = []
        for number, match in enumerate(self._matches):
            mark = QTextEdit.ExtraSelection()
            char = mark_format(is_chosen=number == current)
            cursor = QTextCursor(self.document())
            cursor.setPosition(match.start)
            cursor.setPosition(match.end, QTextCursor.MoveMode.KeepAnchor)
            mark.cursor, mark.format = cursor, char
            marks.append(mark)
        self.setExtraSelections(marks)

    # Geometry

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        if width not in self._heights:
            if len(self._heights) > 8:
                self._heights.clear()
            self._heights[width] = self._height_at(width)
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
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self._place()

    def _line_height(self) -> int:
        return self._style.px(1.5)

    def _height_at(self, width: int) -> int:
        if self.lineWrapColumnOrWidth() != width:
            self.setLineWrapColumnOrWidth(width)
        size = self.document().size()
        height = math.ceil(size.height())
        last = self.document().lastBlock()
        if last.blockFormat().property(CODE) is not None:  # Qt leaves out the last block's margin
            box = self.document().documentLayout().blockBoundingRect(last)
            height = max(height, math.ceil(card_bottom(last, box, self._style)))
        if size.width() > width + 1:  # a table of very many columns
            height += self.horizontalScrollBar().sizeHint().height()
        return max(height, self._line_height(), self._least_height)

    def _place(self, first_button: int = 0) -> None:
        self._put_back.stop()
        before = self._heights.get(self.width())
        height = self._height_at(self.width())
        if before != height:
            self._heights = {self.width(): height}
        if before != height or self.height() != height:
            # A minimum as well as a hint: a parent layout that is one pass behind would otherwise squeeze the answer
            # and cut off its last lines.
            self.setMinimumHeight(height)
            self.updateGeometry()
        self._place_buttons(first_button)

    def _place_buttons(self, first: int = 0) -> None:
        codes = self._writer.codes
        for button in self._buttons[len(codes) :]:
            button.hide()
            button.deleteLater()
        del self._buttons[len(codes) :]
        for number in range(first, len(codes)):
            if number == len(self._buttons):
                self._buttons.append(CopyButton(self.viewport()))
                self._buttons[-1].show()
            button = self._buttons[number]
            segment = self._writer.shown[codes[number]]
            assert isinstance(segment, CodeBlock)
            button.code = segment.code
            button.setAccessibleDescription(segment.language)
            box = self.document().documentLayout().blockBoundingRect(self._writer.first_block(codes[number]))
            size = button.sizeHint()
            top = round(box.top()) - self._style.card_top + (self._style.card_header - size.height()) // 2
            button.setGeometry(self.width() - size.width() - 5, top, size.width(), size.height())

    # Updates

    def _begin_document(self) -> None:
        self.setExtraSelections([])
        self._matches = []
        document = InertDocument(self)
        document.setDocumentMargin(0)
        old = self.document()
        self.setDocument(document)
        if isinstance(old, InertDocument):  # Qt deletes its own
            old.deleteLater()
        self._writer = DocumentWriter(document, self._style)
        self._writer.formulas.settled.connect(self._on_formulas)

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
        """Parses and writes until the deadline; True when the answer is up to date."""
        may_have_more = True
        while may_have_more and time.perf_counter() < deadline:
            may_have_more = self._parser.advance()
        if not may_have_more and not self._is_streaming and not self._parser.is_finished:
            self._parser.finish()
            self._must_recheck = True
        tail = [] if may_have_more else self._parser.tail()
        cursor = self.textCursor()
        anchor, position = self._restored or (cursor.anchor(), cursor.position())
        is_written = self._writer.update(self._parser.finished, tail, deadline, recheck=self._must_recheck)
        is_written = is_written and not may_have_more
        first_button = 0 if self._must_recheck else max(0, len(self._buttons) - 1)
        self._must_recheck = False
        if is_written:
            self._least_height = 0
            self._restored = None
        self._select(anchor, position)
        self._place(first_button)
        self._repaint_end()
        if is_written and not self._is_streaming:
            self._link_references()
            self.setAccessibleDescription(self._text_between(0, self.document().characterCount()))
        return is_written

    def _select(self, anchor: int, position: int) -> None:
        cursor = self.textCursor()
        end = self.document().characterCount() - 1
        anchor, position = min(anchor, end), min(position, end)
        if (cursor.anchor(), cursor.position()) != (anchor, position):
            cursor.setPosition(anchor)
            cursor.setPosition(position, QTextCursor.MoveMode.KeepAnchor)
            self.setTextCursor(cursor)

    def _link_references(self) -> None:
        document, code = self.document(), self._style.code_font().family()
        found = document.find(_REFERENCE) if self._references else QTextCursor()
        while not found.isNull():
            text, char = found.selectedText(), found.charFormat()
            if not char.isAnchor() and char.font().family() != code:
                one = re.fullmatch(r"\[(\d+)\]", text)
                for each in [one] if one is not None else re.finditer(r"(\d+)", text):
                    self._link_reference(found.selectionStart(), each)
            found = document.find(_REFERENCE, found)

    def _link_reference(self, start: int, found: re.Match[str]) -> None:
        if int(found[1]) not in self._references:
            return
        link = QTextCharFormat()
        link.setAnchor(True)
        link.setAnchorHref(f"{_REFERENCES}{int(found[1])}")
        link.setForeground(QColor(self._style.theme.accent_text))
        link.setFontUnderline(True)
        cursor = QTextCursor(self.document())
        cursor.setPosition(start + found.start())
        cursor.setPosition(start + found.end(), QTextCursor.MoveMode.KeepAnchor)
        cursor.mergeCharFormat(link)

    def _text_between(self, start: int, end: int) -> str:
        return plain_text(self.document(), start, end)

    def _repaint_end(self) -> None:
        """Paints anew what is drawn behind the text that has changed; Qt sees to the text."""
        document = self.document()
        box = document.documentLayout().blockBoundingRect(document.findBlock(self._writer.changed_from))
        top = math.floor(box.top()) - self._style.card_top - self._line_height()
        self.viewport().update(0, top, self.viewport().width(), self.viewport().height() - top)

    def _on_formulas(self) -> None:
        self._place()
        self.viewport().update()

    def _restyle(self) -> None:
        self.ensurePolished()
        style = Style(self.theme(), self.font())
        if style.same_as(self._style):
            return
        cursor = self.textCursor()
        self._restored = self._restored or (cursor.anchor(), cursor.position())
        self._style = style
        self._least_height = self.height() if self._writer.shown else 0
        self._heights.clear()
        self._begin_document()
        self._timer.start(0)
        self._update()

    # Events

    def createMimeDataFromSelection(self) -> QMimeData:
        data = QMimeData()
        data.setText(self.selected_text())
        return data

    def loadResource(self, kind: int, name: QUrl | str) -> None:  # noqa: ARG002
        return

    def copy(self) -> None:
        """Copies the selection or, without one, the whole answer as Markdown."""
        text = self.selected_text()
        QGuiApplication.clipboard().setText(text) if text else self.copy_all()

    def build_menu(self, link: str) -> QMenu:
        menu = QMenu(self)
        copy = menu.addAction(self.tr("Copy"), self.copy)
        copy.setEnabled(self.textCursor().hasSelection())
        if link:
            menu.addAction(self.tr("Copy link"), lambda: QGuiApplication.clipboard().setText(link))
        menu.addAction(self.tr("Select all"), self.select_all)
        menu.addSeparator()
        menu.addAction(
            self.tr("Copy all as plain text"), lambda: QGuiApplication.clipboard().setText(self.plain_text())
        )
        menu.addAction(self.tr("Copy all as Markdown"), self.copy_all)
        return menu

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange) and hasattr(self, "_put_back"):
            self._restyle()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.SelectAll):
            self.select_all()
        elif event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif event.key() in _KEYS_THAT_SCROLL and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            event.ignore()  # scrolling belongs to the page around the answer
        else:
            if event.key() in _KEYS_THAT_MOVE:
                # Not before, as then the text cursor would blink in every answer that was clicked on.
                self.setTextInteractionFlags(_WITH_KEYS)
            before = self.textCursor().position()
            super().keyPressEvent(event)
            if self.textCursor().position() != before:
                self._scroll_to(self.cursorRect().center(), 24)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        super().mouseMoveEvent(event)
        if event.buttons() & Qt.MouseButton.LeftButton:
            self._scroll_to(event.position().toPoint(), 8)

    def _scroll_to(self, place: QPoint, margin: int) -> None:
        """Keeps a place in the view visible in the enclosing scroll area, if there is one."""
        area = self.parentWidget()
        while area is not None and not isinstance(area, QScrollArea):
            area = area.parentWidget()
        if area is not None and (content := area.widget()) is not None:
            at = self.viewport().mapTo(content, place)
            area.ensureVisible(area.horizontalScrollBar().value(), at.y(), 0, margin)

    def wheelEvent(self, event: QWheelEvent) -> None:
        bar = self.horizontalScrollBar()
        delta = event.angleDelta().x() or event.pixelDelta().x()
        if event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            delta = delta or event.angleDelta().y()
        if delta and bar.maximum() > 0:
            bar.setValue(bar.value() - delta)
            event.accept()
        else:
            event.ignore()

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        menu = self.build_menu(allowed_link(self.anchorAt(event.pos())))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(event.globalPos())

    def viewportEvent(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            address = self.anchorAt(event.pos())
            said = address if allowed_link(address) else self._references.get(_number_in(address), "")
            if said:
                QToolTip.showText(event.globalPos(), said[:500], self.viewport())
            else:
                QToolTip.hideText()
            return True
        return super().viewportEvent(event)

    def focusInEvent(self, event: QFocusEvent) -> None:
        by_keyboard = (Qt.FocusReason.TabFocusReason, Qt.FocusReason.BacktabFocusReason)
        self._shows_focus = event.reason() in by_keyboard
        super().focusInEvent(event)
        self.viewport().update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        self._shows_focus = False
        super().focusOutEvent(event)
        if event.reason() != Qt.FocusReason.PopupFocusReason:
            self.setTextInteractionFlags(Qt.TextInteractionFlag.TextBrowserInteraction)
        self.viewport().update()

    def _on_anchor(self, url: QUrl) -> None:
        if allowed_link(url.toString()):
            self.link_activated.emit(url)
        elif (number := _number_in(url.toString())) in self._references:
            self.reference_activated.emit(number)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self.viewport())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        left = self.horizontalScrollBar().value()
        painter.translate(-left, 0)
        paint_behind(painter, self.document(), QRectF(event.rect()).translated(left, 0), self._style)
        painter.translate(left, 0)
        if self._is_streaming:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QColor(self._style.theme.accent))
            painter.drawRoundedRect(self.stream_cursor_rect(), 2, 2)
        if self._shows_focus:
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.setPen(QPen(QColor(self._style.theme.accent), 2))
            painter.drawRoundedRect(QRectF(self.viewport().rect()).adjusted(1, 1, -1, -1), 6, 6)
        painter.end()
        super().paintEvent(event)

    def stream_cursor_rect(self) -> QRectF:
        line = self.cursorRect(self._writer.end_of_text())
        height = min(line.height(), round(self._style.body_px * 1.15))
        left = min(line.left() + _CURSOR_GAP, self.viewport().width() - _CURSOR_WIDTH)
        return QRectF(QPointF(left, line.bottom() + 1 - height), QSize(_CURSOR_WIDTH, height).toSizeF())


def _places(text: str, index: int) -> int:
    """How many of a document's places a text's beginning takes."""
    before = text[:index]
    return index if before.isascii() else len(before.encode("utf-16-le", "surrogatepass")) // 2
