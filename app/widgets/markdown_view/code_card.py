"""A code block: a card with the language, a Copy button and highlighted code."""

from __future__ import annotations

import time

from PySide6.QtCore import QRect, QRectF, QSize, Qt, QTimer
from PySide6.QtGui import (
    QColor,
    QFontMetrics,
    QGuiApplication,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
    QTextBlockFormat,
    QTextCursor,
)
from PySide6.QtWidgets import QAbstractButton, QTextEdit, QWidget

from app.widgets.markdown_view.document_pane import DocumentPane
from app.widgets.markdown_view.highlighter import CodeHighlighter
from app.widgets.markdown_view.segments import CodeBlock, Segment
from app.widgets.markdown_view.style import Style
from app.widgets.markdown_view.text_writer import base_format
from engine.common.plain_text import few_marks

_RADIUS = 10
_SLICE_S = 0.006
_SCAN_PAUSE_MS = 300  # between two scans of code that is still growing
_COPIED_MS = 2_000


class CopyButton(QAbstractButton):
    """A quiet text button that shows "Copied" for two seconds."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._style: Style | None = None
        self._reset = QTimer(self)
        self._reset.setSingleShot(True)
        self._reset.setInterval(_COPIED_MS)
        self._reset.timeout.connect(self._show_copy)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self._show_copy()

    def set_style(self, style: Style) -> None:
        self._style = style
        self.updateGeometry()
        self.update()

    def say_copied(self) -> None:
        self.setText(self.tr("Copied"))
        self.setAccessibleName(self.tr("Copied"))
        self._reset.start()

    def sizeHint(self) -> QSize:
        # Not the widget's own font, which the style sheet sets to the body text's.
        metrics = QFontMetrics(self._style.small_font) if self._style is not None else self.fontMetrics()
        widest = max(metrics.horizontalAdvance(text) for text in (self.tr("Copy"), self.tr("Copied")))
        return QSize(widest + 16, metrics.height() + 8)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        if self._style is None:
            return
        theme = self._style.theme
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if self.isDown() or self.underMouse():
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QColor(theme.border))
            painter.drawRoundedRect(self.rect(), 6, 6)
        if self.hasFocus():
            painter.setPen(QPen(QColor(theme.accent), 2))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(1, 1, -1, -1), 6, 6)
        painter.setFont(self._style.small_font)
        painter.setPen(QColor(theme.text if self.underMouse() or self._reset.isActive() else theme.muted))
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignCenter, self.text())
        painter.end()

    def _show_copy(self) -> None:
        self.setText(self.tr("Copy"))
        self.setAccessibleName(self.tr("Copy code"))


class CodeCard(QWidget):
    """One code block.  Growing text is appended; highlighting follows a few times per second."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.containers = ""
        self._style: Style | None = None
        self._whole = self._code = ""  # all of it, and what is shown
        self._language = ""
        self._scanned: tuple[str, str] | None = None
        self._scan_cost_s = 0.0
        self._is_scanning = False
        self._button = CopyButton(self)
        self._button.clicked.connect(self._copy)
        self._text = DocumentPane(self)
        self._text.setLineWrapMode(QTextEdit.LineWrapMode.NoWrap)
        self._text.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)
        self._text.setLayoutDirection(Qt.LayoutDirection.LeftToRight)
        self._highlighter = CodeHighlighter(self._text.document())
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._scan)

    @property
    def code(self) -> str:
        return self._whole

    @property
    def copy_button(self) -> QAbstractButton:
        return self._button

    @property
    def highlighter(self) -> CodeHighlighter:
        return self._highlighter

    # The pane interface

    def begin(self, segment: Segment, style: Style) -> None:
        assert isinstance(segment, CodeBlock)
        self.containers = segment.containers
        if self._style is not style:
            self._style = style
            self._button.set_style(style)
            self._set_code("")
            self._highlighter.reset()
            self._highlighter.set_style(style)
            self._scanned = None
        self._language = segment.language
        self._text.setAccessibleName(
            self.tr("Code in {language}").format(language=segment.language) if segment.language else self.tr("Code")
        )
        self._whole = segment.code
        self._set_code(few_marks(segment.code))
        self._schedule()
        self.update()

    def accepts(self, segment: Segment) -> bool:  # noqa: ARG002
        return False

    def height_for(self, width: int) -> int:
        lines = self._code.count("\n") + 1
        height = self._header_height() + lines * self._line_height() + 2 * self._padding() + 2
        is_too_wide = self._text.document().idealWidth() > width - 2 * self._padding() - 2
        if is_too_wide:
            height += self._text.horizontalScrollBar().sizeHint().height()
        # Only code that can be scrolled is worth a tab stop.
        self._text.setFocusPolicy(Qt.FocusPolicy.StrongFocus if is_too_wide else Qt.FocusPolicy.ClickFocus)
        return height

    def browser(self) -> DocumentPane:
        return self._text

    # Private

    def _header_height(self) -> int:
        return self._button.sizeHint().height() + 8

    def _line_height(self) -> int:
        return self._style.code_line_height if self._style is not None else 20

    def _padding(self) -> int:
        return self._style.px(0.85) if self._style is not None else 12

    def _set_code(self, code: str) -> None:
        """Updates the document to `code`, by appending if it only grew."""
        if code == self._code and not self._text.document().isEmpty():
            return
        assert self._style is not None
        char = base_format(self._style.code_font(), self._style.theme.text)
        cursor = QTextCursor(self._text.document())
        cursor.beginEditBlock()
        if self._code and code.startswith(self._code):
            cursor.movePosition(QTextCursor.MoveOperation.End)
            added = code[len(self._code) :]
        else:
            cursor.select(QTextCursor.SelectionType.Document)
            cursor.removeSelectedText()
            self._highlighter.reset()
            form = QTextBlockFormat()
            form.setLineHeight(self._line_height(), QTextBlockFormat.LineHeightTypes.FixedHeight.value)
            form.setLayoutDirection(Qt.LayoutDirection.LeftToRight)
            cursor.setBlockFormat(form)
            cursor.setBlockCharFormat(char)
            added = code
        cursor.insertText(added, char)
        cursor.endEditBlock()
        if added == code:
            # The pane's own cursor moved to the end, and would scroll the view with it.
            self._text.moveCursor(QTextCursor.MoveOperation.Start)
        self._code = code

    def _schedule(self) -> None:
        if not self._timer.isActive() and self._scanned != (self._code, self._language):
            pause = _SCAN_PAUSE_MS + 10 * 1000 * self._scan_cost_s if self._scanned is not None else 0
            self._timer.start(round(pause))

    def _scan(self) -> None:
        """Starts a scan, or continues the current one."""
        started = time.perf_counter()
        wanted = (self._code, self._language)
        if not self._is_scanning:
            self._scanned = wanted
            self._scan_cost_s = 0.0
            self._is_scanning = self._highlighter.start(*wanted)
        if self._is_scanning:
            self._is_scanning = self._highlighter.advance(_SLICE_S)
        self._scan_cost_s += time.perf_counter() - started
        if self._is_scanning:
            self._timer.start(0)
        else:
            self._schedule()

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self._whole)
        self._button.say_copied()

    def resizeEvent(self, event: QResizeEvent) -> None:  # noqa: ARG002
        header, padding, button = self._header_height(), self._padding(), self._button.sizeHint()
        self._button.setGeometry(self.width() - button.width() - 5, 4, button.width(), button.height())
        self._text.setGeometry(
            QRect(
                padding + 1, header + padding - 3, self.width() - 2 * padding - 2, self.height() - header - padding + 2
            )
        )

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        if self._style is None:
            return
        theme = self._style.theme
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(QColor(theme.border), 1))
        painter.setBrush(QColor(theme.sunken))
        painter.drawRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), _RADIUS, _RADIUS)
        header = self._header_height()
        painter.drawLine(1, header, self.width() - 2, header)
        painter.setFont(self._style.small_font)
        painter.setPen(QColor(theme.muted))
        room = QRect(self._padding(), 0, self._button.x() - self._padding() - 8, header)
        name = painter.fontMetrics().elidedText(self._language, Qt.TextElideMode.ElideRight, room.width())
        painter.drawText(room, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, name)
        painter.end()
