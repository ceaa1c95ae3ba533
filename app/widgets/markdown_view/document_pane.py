"""Part of an answer shown as a text document: selectable, inert, without scroll bars of its own."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QPoint, QRect, QRectF, Qt, QUrl, Signal
from PySide6.QtGui import (
    QColor,
    QContextMenuEvent,
    QHelpEvent,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QTextCursor,
    QTextDocument,
    QTextOption,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QTextBrowser, QToolTip, QWidget

from app.widgets.markdown_view.token_reader import allowed_link

_CURSOR_WIDTH = 8
_CURSOR_GAP = 3


class InertDocument(QTextDocument):
    """A document without resources: QTextDocument itself would load images from the disk."""

    def loadResource(self, kind: int, name: QUrl | str) -> None:  # noqa: ARG002
        """Never loads anything, neither from the network nor from the disk."""
        return


class DocumentPane(QTextBrowser):
    """A `QTextBrowser` that loads nothing, opens nothing, and leaves vertical scrolling to its parents."""

    link_clicked = Signal(QUrl)
    copy_requested = Signal()
    select_all_requested = Signal()
    menu_requested = Signal(QPoint, str)  # global position, and the address of the link there

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._stream_cursor: QColor | None = None
        self.setProperty("bare", True)  # see resources/themes/switchyard.qss
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.viewport().setAutoFillBackground(False)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setOpenLinks(False)
        self.setOpenExternalLinks(False)
        self.setUndoRedoEnabled(False)
        self.setAcceptDrops(False)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setDocument(InertDocument(self))
        self.document().setDocumentMargin(0)
        # The owner sets the line width, not the widget, which is resized only later.
        self.setLineWrapMode(QTextBrowser.LineWrapMode.FixedPixelWidth)
        self.setLineWrapColumnOrWidth(640)
        self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        self.anchorClicked.connect(self._on_anchor)

    def loadResource(self, kind: int, name: QUrl | str) -> None:  # noqa: ARG002
        """Nothing: see `InertDocument`."""
        return

    def set_wrap_width(self, width: int) -> None:
        """Lays the text out for `width`, whatever the pane's present size."""
        if self.lineWrapColumnOrWidth() != width:
            self.setLineWrapColumnOrWidth(width)

    def set_stream_cursor(self, colour: QColor | None) -> None:
        """Shows a block cursor after the last character, or hides it; it does not blink."""
        if colour != self._stream_cursor:
            self._stream_cursor = colour
            self.viewport().update()

    @property
    def has_stream_cursor(self) -> bool:
        return self._stream_cursor is not None

    def selected_text(self) -> str:
        """The selection as plain text; empty if there is none."""
        return plain(self.textCursor().selectedText())

    def clear_selection(self) -> None:
        cursor = self.textCursor()
        if cursor.hasSelection():
            cursor.clearSelection()
            self.setTextCursor(cursor)

    def select(self, anchor: int, position: int) -> None:
        """Selects between two positions of the document; -1 is its end."""
        end = max(0, self.document().characterCount() - 1)
        cursor = self.textCursor()
        cursor.setPosition(end if anchor < 0 else min(anchor, end))
        cursor.setPosition(end if position < 0 else min(position, end), QTextCursor.MoveMode.KeepAnchor)
        self.setTextCursor(cursor)

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self._stream_cursor is not None:
            painter = QPainter(self.viewport())
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(self._stream_cursor)
            painter.drawRoundedRect(self.stream_cursor_rect(), 2, 2)
            painter.end()

    def end_of_text(self) -> QTextCursor:
        """Where the next character would be written."""
        end = QTextCursor(self.document())
        end.movePosition(QTextCursor.MoveOperation.End)
        return end

    def stream_cursor_rect(self) -> QRectF:
        line: QRect = self.cursorRect(self.end_of_text())
        height = min(line.height(), round(self.fontMetrics().height() * 0.95))
        left = min(line.left() + _CURSOR_GAP, self.viewport().width() - _CURSOR_WIDTH)
        return QRectF(left, line.bottom() + 1 - height, _CURSOR_WIDTH, height)

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

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy_requested.emit()
        elif event.matches(QKeySequence.StandardKey.SelectAll):
            self.select_all_requested.emit()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Left, Qt.Key.Key_Right):
            super().keyPressEvent(event)
        else:
            event.ignore()  # scrolling belongs to the page around the answer

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        self.menu_requested.emit(event.globalPos(), self.anchorAt(event.pos()))

    def viewportEvent(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            address = self.anchorAt(event.pos())
            if address:
                QToolTip.showText(event.globalPos(), address[:500], self.viewport())
            else:
                QToolTip.hideText()
            return True
        return super().viewportEvent(event)

    def _on_anchor(self, url: QUrl) -> None:
        if allowed_link(url.toString()):
            self.link_clicked.emit(url)


def plain(selected: str) -> str:
    """A document's text with ordinary line breaks, without object and frame characters."""
    return selected.replace("\u2029", "\n").replace("\u2028", "\n").replace("\ufdd0", "").replace("\ufdd1", "")
