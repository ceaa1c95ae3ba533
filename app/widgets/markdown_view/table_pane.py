"""A table: as wide as its text needs, wrapped to the answer's width, scrolled sideways if still too wide."""

from __future__ import annotations

import math

from PySide6.QtCore import Qt
from PySide6.QtGui import (
    QColor,
    QTextBlockFormat,
    QTextCursor,
    QTextFrameFormat,
    QTextOption,
    QTextTable,
    QTextTableCell,
    QTextTableCellFormat,
    QTextTableFormat,
)
from PySide6.QtWidgets import QWidget

from app.widgets.markdown_view.document_pane import DocumentPane
from app.widgets.markdown_view.segments import Alignment, Segment, TableBlock
from app.widgets.markdown_view.style import Style
from app.widgets.markdown_view.text_writer import base_format, insert_spans

_ALIGNMENTS: dict[Alignment, Qt.AlignmentFlag] = {
    "left": Qt.AlignmentFlag.AlignLeft,
    "center": Qt.AlignmentFlag.AlignHCenter,
    "right": Qt.AlignmentFlag.AlignRight,
}


class TablePane(DocumentPane):
    """One table in its own document."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.containers = ""
        self._table: QTextTable | None = None
        self.setWordWrapMode(QTextOption.WrapMode.WordWrap)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)
        self.setAccessibleName(self.tr("Table"))

    def begin(self, segment: Segment, style: Style) -> None:
        assert isinstance(segment, TableBlock)
        self.containers = segment.containers
        document = self.document()
        document.clear()
        document.setDefaultFont(style.font)
        cursor = QTextCursor(document)
        cursor.beginEditBlock()
        table = cursor.insertTable(len(segment.rows), len(segment.alignments), _table_format())
        self._table = table
        for row, cells in enumerate(segment.rows):
            for column, spans in enumerate(cells):
                cell = table.cellAt(row, column)
                font = style.heading_font(6) if row == 0 else style.font
                char = base_format(font, style.theme.text)
                inside = cell.firstCursorPosition()
                form = QTextBlockFormat()
                form.setAlignment(_ALIGNMENTS[segment.alignments[column]])
                inside.setBlockFormat(form)
                insert_spans(inside, spans, char, style)
                _frame_cell(cell, style, is_header=row == 0, is_last=row == len(segment.rows) - 1)
        cursor.movePosition(QTextCursor.MoveOperation.End)  # the empty block that Qt keeps below a table
        below = QTextBlockFormat()
        below.setLineHeight(1, QTextBlockFormat.LineHeightTypes.FixedHeight.value)
        cursor.setBlockFormat(below)
        cursor.endEditBlock()
        has_links = any(span.href for row in segment.rows for cell in row for span in cell)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus if has_links else Qt.FocusPolicy.ClickFocus)

    def accepts(self, segment: Segment) -> bool:  # noqa: ARG002
        return False

    def height_for(self, width: int) -> int:
        if self._table is None:
            return 0
        self.set_wrap_width(width)
        document = self.document()
        height = math.ceil(document.size().height())
        if document.documentLayout().frameBoundingRect(self._table).right() > width + 1:
            height += self.horizontalScrollBar().sizeHint().height()
        return height

    def end_of_text(self) -> QTextCursor:
        if self._table is None:
            return super().end_of_text()
        cells = [self._table.cellAt(self._table.rows() - 1, column) for column in range(self._table.columns())]
        ends = [cell.lastCursorPosition() for cell in cells]
        # markdown-it fills an incomplete row with empty cells.
        return next((end for end in reversed(ends) if not end.atBlockStart()), ends[0])

    def browser(self) -> DocumentPane:
        return self


def _table_format() -> QTextTableFormat:
    form = QTextTableFormat()
    form.setBorder(0)
    form.setBorderCollapse(True)
    form.setCellSpacing(0)
    form.setCellPadding(0)
    form.setHeaderRowCount(1)
    return form


def _frame_cell(cell: QTextTableCell, style: Style, is_header: bool, is_last: bool) -> None:
    form = QTextTableCellFormat()
    form.setTopPadding(style.px(0.4))
    form.setBottomPadding(style.px(0.4))
    form.setLeftPadding(style.px(0.7))
    form.setRightPadding(style.px(0.7))
    if not is_last:
        form.setBottomBorder(1)
        form.setBottomBorderStyle(QTextFrameFormat.BorderStyle.BorderStyle_Solid)
        form.setBottomBorderBrush(QColor(style.theme.faint if is_header else style.theme.border))
    cell.setFormat(form)
