"""Writes segments into a text document, at its end: what has only grown is only appended to.

Lists, quotes and code are plain blocks with margins, so that any end of the document can be taken away again; a list
item's marker is text before a tab, so that it is read aloud, selected and copied.  What is drawn behind the text
(cards, bars, boxes) is found by the properties that are named here: see `paper`.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontMetrics,
    QTextBlock,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
    QTextFrameFormat,
    QTextOption,
    QTextTable,
    QTextTableCellFormat,
    QTextTableFormat,
)

from app.services.formulas import Formula, Picture
from app.theme import tabular
from app.widgets.answer_text.blocks import (
    Alignment,
    CodeBlock,
    Gap,
    Marker,
    MathsBlock,
    RuleBlock,
    Segment,
    TableBlock,
    TextBlock,
    TextSpan,
    spans_text,
)
from app.widgets.answer_text.highlighting import Highlighter
from app.widgets.answer_text.maths import OBJECT, FormulaWriter, formula_in
from app.widgets.answer_text.style import Style
from engine.common.plain_text import few_marks

_PROPERTY = QTextFormat.Property.UserProperty.value + 100
CONTAINERS = _PROPERTY
"""Of a block: its lists and quotes."""
CODE, LANGUAGE, RULE, GLUE, SPACED = (_PROPERTY + number for number in range(1, 6))
"""Of a block: the number of the code that it is a line of; its language (of the first line); that it is a rule; that it
is only there because Qt has a block between tables; that there is space above it."""
MARKER, INLINE_CODE = _PROPERTY + 6, _PROPERTY + 7
"""Of characters: the list marker that they are, as in Markdown; that they are code in a line."""

_LINES_AT_ONCE = 300
"""Of code, before other events are processed."""
_CHARACTERS_AT_ONCE = 10_000
"""The same of any text, as it is laid out after it has been written."""
_MARKER_GAP_EMS = 0.45
_BULLETS = "•◦▪"
_ALIGNMENTS: dict[Alignment, Qt.AlignmentFlag] = {
    "left": Qt.AlignmentFlag.AlignLeft,
    "center": Qt.AlignmentFlag.AlignHCenter,
    "right": Qt.AlignmentFlag.AlignRight,
}
_DISTANCE = QTextBlockFormat.LineHeightTypes.LineDistanceHeight.value
_FIXED = QTextBlockFormat.LineHeightTypes.FixedHeight.value


class InertDocument(QTextDocument):
    """A document without resources: QTextDocument itself would load images from the disk."""

    def loadResource(self, kind: int, name: object) -> None:  # noqa: ARG002
        """Never loads anything, neither from the network nor from the disk."""
        return


@dataclass(slots=True)
class _Mark:
    position: int
    form: QTextBlockFormat
    start: int = 0
    """Where the segment begins."""


class DocumentWriter(QObject):
    """Writes one text at the end of a document, in one style; a document may get several, one after the other."""

    def __init__(self, document: QTextDocument, style: Style, drawn: Mapping[Formula, Picture] | None = None) -> None:
        """`drawn`: as for `FormulaWriter`."""
        super().__init__(document)
        self._document = document
        self._style = style
        self._chars: dict[object, QTextCharFormat] = {}
        self.shown: list[Segment] = []
        self._marks: list[_Mark] = []
        self._certain = 0  # segments known to match the target since the last update
        self.written_segments = 0
        self.codes: list[int] = []
        self.changed_from = 0
        """Where the document differs from what it was before the last update."""
        self.formulas = FormulaWriter(document, drawn)
        self.formulas.moved.connect(self._on_moved)
        self.highlighter = Highlighter(document, style)
        document.setDefaultFont(style.font)
        option = document.defaultTextOption()
        option.setWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        option.setTabStopDistance(4 * QFontMetrics(style.code_font()).horizontalAdvance(" "))
        document.setDefaultTextOption(option)
        document.setUndoRedoEnabled(False)
        if not document.isEmpty():
            self._end().insertBlock(QTextBlockFormat())

    def update(
        self, finished: Sequence[Segment], tail: Sequence[Segment], deadline: float, *, recheck: bool = False
    ) -> bool:
        """Shows `finished` and then `tail`; stops after `deadline` (of `time.perf_counter`) and then returns False.

        Args:
            recheck: also compare finished segments that were compared before.
        """
        if recheck:
            self._certain = 0
        total = len(finished) + len(tail)

        def wanted(index: int) -> Segment:
            return finished[index] if index < len(finished) else tail[index - len(finished)]

        same = min(self._certain, len(self.shown))
        while same < min(len(self.shown), total) and self.shown[same] == wanted(same):
            same += 1
        self.changed_from = self._marks[same].start if same < len(self.shown) else self._end().position()
        start = self._end().position()
        edit = QTextCursor(self._document)
        edit.beginEditBlock()
        if same < len(self.shown):
            if same + 1 < len(self.shown):
                self._rewind(same + 1)
            if same == total or not self._grow(wanted(same)):
                self._rewind(same)
        while True:
            last = len(self.shown) - 1
            if last >= 0 and isinstance(self.shown[last], CodeBlock):
                self._colour(last, is_open=last >= len(finished) or self.shown[last] != wanted(last))
            if last >= 0 and self.shown[last] != wanted(last):
                if not self._grow(wanted(last)):  # by the next lines of long code
                    self._rewind(last)
            elif last + 1 < total:
                self._write(wanted(last + 1))
            else:
                break
            if time.perf_counter() > deadline or self._end().position() - start > _CHARACTERS_AT_ONCE:
                break
        edit.endEditBlock()
        self._certain = min(len(finished), len(self.shown))
        return len(self.shown) == total and (not total or self.shown[-1] == wanted(total - 1))

    def first_block(self, index: int) -> QTextBlock:
        """The first block of a segment that is shown, other than a table."""
        return self._document.findBlock(self._marks[index].start)

    def end_of_text(self) -> QTextCursor:
        if not self.shown or not isinstance(self.shown[-1], TableBlock):
            return self._end()
        table = self._last_table()
        cells = [table.cellAt(table.rows() - 1, column) for column in range(table.columns())]
        ends = [cell.lastCursorPosition() for cell in cells]
        # markdown-it fills an incomplete row with empty cells.
        return next((end for end in reversed(ends) if not end.atBlockStart()), ends[0])

    # Text

    def _last_table(self) -> QTextTable:
        cursor = QTextCursor(self._document)
        cursor.setPosition(self._marks[-1].position + 1)
        table = cursor.currentTable()
        assert table is not None
        return table

    def _end(self) -> QTextCursor:
        cursor = QTextCursor(self._document)
        cursor.movePosition(QTextCursor.MoveOperation.End)
        return cursor

    def _on_moved(self, position: int, by: int) -> None:
        for mark in reversed(self._marks):
            if mark.position < position:
                break
            mark.position += by
            mark.start += by

    def _rewind(self, count: int) -> None:
        mark = self._marks[count]
        cursor = QTextCursor(self._document)
        cursor.setPosition(mark.position)
        cursor.movePosition(QTextCursor.MoveOperation.End, QTextCursor.MoveMode.KeepAnchor)
        cursor.removeSelectedText()
        # When an empty block merges with what is removed below it, Qt keeps the latter's format.
        cursor.setBlockFormat(mark.form)
        self.formulas.forget(mark.position)
        self.highlighter.forget(count)
        del self.shown[count:], self._marks[count:]
        while self.codes and self.codes[-1] >= count:
            self.codes.pop()

    def _write(self, segment: Segment) -> None:
        cursor = self._end()
        above = self.shown[-1] if self.shown else None
        self._marks.append(_Mark(cursor.position(), cursor.blockFormat()))
        self.written_segments += 1
        if isinstance(segment, CodeBlock):
            segment = _first_lines(segment, 0)
            self.codes.append(len(self.shown))
        self.shown.append(segment)
        gap = self._style.gap(above, segment)
        if self._marks[-1].position == 0:
            gap = 0
        if isinstance(above, CodeBlock):
            gap += self._style.card_padding  # of two margins Qt takes the larger
        if isinstance(segment, TableBlock):
            self._write_table(cursor, segment, gap)
            return
        form = self._block_format(segment, gap)
        char = self._base(segment)
        if above is None and not isinstance(segment, CodeBlock):
            cursor.setBlockFormat(form)
            cursor.setBlockCharFormat(char)
        else:
            if above is None:  # Qt leaves no margin above the first block
                self._make_glue(cursor)
            cursor.insertBlock(form, char)
        self._marks[-1].start = cursor.position()
        if isinstance(segment, TextBlock):
            if segment.marker is not None:
                self._write_marker(cursor, segment, segment.marker)
            self._write_spans(cursor, segment.spans, char, _look_of(segment))
        elif isinstance(segment, CodeBlock):
            self._write_lines(cursor, few_marks(segment.code))
        elif isinstance(segment, MathsBlock):
            formula = Formula(segment.tex, display=True)
            code = self._char(TextSpan("", code=True), char, _look_of(segment))
            self.formulas.write(cursor, formula, segment.source, self._style.maths_px, char, code)

    def _grow(self, segment: Segment) -> bool:
        """Turns the last segment into this one, by writing from the first difference on, if that is possible."""
        last, index = self.shown[-1], len(self.shown) - 1
        if isinstance(segment, CodeBlock) and isinstance(last, CodeBlock):
            segment = _first_lines(segment, last.code.count("\n"))
            if (segment.language, segment.containers) != (last.language, last.containers):
                return False
            self._change_code(few_marks(last.code), few_marks(segment.code))
        elif isinstance(segment, TextBlock) and isinstance(last, TextBlock):
            if _frame_of(segment) != _frame_of(last):
                return False
            self._change_spans(last, segment)
        elif isinstance(segment, TableBlock) and isinstance(last, TableBlock):
            table = self._last_table()
            count = len(last.rows)
            if segment.alignments != last.alignments or segment.containers != last.containers:
                return False
            if len(segment.rows) < count or segment.rows[: count - 1] != last.rows[: count - 1]:
                return False
            self._change_rows(table, last, segment)
        else:
            return False
        self.written_segments += 1
        self.shown[index] = segment
        return True

    def _block_format(self, segment: Segment, gap: int) -> QTextBlockFormat:
        style = self._style
        form = QTextBlockFormat()
        form.setProperty(CONTAINERS, segment.containers)
        form.setProperty(SPACED, segment.gap is not Gap.ITEM)
        form.setTopMargin(gap)
        left = style.left_of(segment.containers)
        form.setLeftMargin(left)
        if isinstance(segment, CodeBlock):
            form.setTopMargin(gap + style.card_top)
            form.setBottomMargin(style.card_padding)
            form.setLeftMargin(left + style.card_padding)
            form.setRightMargin(style.card_padding)
            form.setLineHeight(style.code_line_height, _FIXED)
            form.setLayoutDirection(Qt.LayoutDirection.LeftToRight)
            form.setProperty(CODE, len(self.shown))
            form.setProperty(LANGUAGE, segment.language or " ")  # PySide takes an empty text for a list
        elif isinstance(segment, RuleBlock):
            form.setLineHeight(9, _FIXED)
            form.setProperty(RULE, True)
        else:
            form.setLineHeight(style.line_distance(self._base(segment).font()), _DISTANCE)
        if isinstance(segment, MathsBlock):
            form.setAlignment(Qt.AlignmentFlag.AlignHCenter)
            form.setLayoutDirection(Qt.LayoutDirection.LeftToRight)
        if isinstance(segment, TextBlock):
            form.setHeadingLevel(segment.heading)
            hanging = 0
            if segment.marker is not None:
                gap_px = round(style.px(1) * _MARKER_GAP_EMS)
                width = QFontMetrics(tabular(style.font)).horizontalAdvance(_shown_marker(segment, segment.marker))
                hanging = max(style.indent, width + gap_px)
                left += max(0, hanging - style.indent)
                form.setTextIndent(-hanging)
                right_tab = QTextOption.Tab(hanging - gap_px, QTextOption.TabType.RightTab)
                form.setTabPositions([right_tab, QTextOption.Tab(hanging, QTextOption.TabType.LeftTab)])
            if _is_right_to_left(segment):
                form.setLayoutDirection(Qt.LayoutDirection.RightToLeft)
                form.setLeftMargin(0)
                form.setRightMargin(left)
            else:
                form.setLeftMargin(left)
        return form

    def _write_marker(self, cursor: QTextCursor, block: TextBlock, marker: Marker) -> None:
        char = QTextCharFormat(self._base(block))
        char.setFont(tabular(self._style.font))
        char.setForeground(QColor(self._style.theme.accent_text if marker.checked else self._style.theme.muted))
        char.setProperty(MARKER, "  " * (block.containers.count("l") - 1) + marker.text() + " ")
        cursor.insertText(f"\t{_shown_marker(block, marker)}\t", char)

    # Spans

    def _base(self, segment: Segment) -> QTextCharFormat:
        style, look = self._style, _look_of(segment)
        found = self._chars.get(look)
        if found is None:
            found = self._chars[look] = QTextCharFormat()
            heading = segment.heading if isinstance(segment, TextBlock) else 0
            font = QFont(
                style.code_font() if look == "code" else style.heading_font(heading) if heading else style.font
            )
            if font.pixelSize() < 0:
                font.setPixelSize(style.body_px)
            found.setFont(font)
            found.setForeground(QColor(style.theme.muted if look == "quoted" else style.theme.text))
        return found

    def _char(self, span: TextSpan, base: QTextCharFormat, look: object) -> QTextCharFormat:
        key = (look, span.bold, span.italic, span.strike, span.code, span.href)
        char = self._chars.get(key)
        if char is None:
            if len(self._chars) > 500:  # each link has its own
                self._chars.clear()
            char = self._chars[key] = QTextCharFormat(base)
            if span.code:
                px = base.font().pixelSize()
                char.setFont(self._style.code_font(round((px if px > 0 else self._style.body_px) * 0.92)))
                char.setProperty(INLINE_CODE, True)
            if span.bold:
                char.setFontWeight(QFont.Weight.Bold)
            char.setFontItalic(span.italic)
            char.setFontStrikeOut(span.strike)
            if span.href:
                char.setAnchor(True)
                char.setAnchorHref(span.href)
                char.setForeground(QColor(self._style.theme.accent_text))
                char.setFontUnderline(True)
        return char

    def _write_spans(self, cursor: QTextCursor, spans: Iterable[TextSpan], base: QTextCharFormat, look: object) -> None:
        for span in spans:
            if span.tex:
                code = self._char(TextSpan("", code=True), base, look)
                formula = formula_in(span.tex, span.text)
                em = self._style.maths_px * base.font().pixelSize() / self._style.body_px
                self.formulas.write(cursor, formula, span.text, em, base, code)
            else:
                text = few_marks(span.text).replace("\n", "\u2028")
                cursor.insertText(text, self._char(span, base, look))

    def _change_spans(self, last: TextBlock, wanted: TextBlock) -> None:
        """Rewrites the last block from the first character that differs."""
        same = 0
        both = min(len(last.spans), len(wanted.spans))
        while same < both and last.spans[same] == wanted.spans[same]:
            same += 1
        cursor = self._end()
        position = cursor.block().position()
        if last.marker is not None:
            position += len(_shown_marker(last, last.marker)) + 2
        for span in last.spans[:same]:
            is_drawn = span.tex and self._document.characterAt(position) == OBJECT
            position += 1 if is_drawn else _utf16_length(few_marks(span.text))
        rest = list(wanted.spans[same:])
        if same < both and last.spans[same].looks_like(rest[0]):
            common = _common(few_marks(last.spans[same].text), few_marks(rest[0].text))
            position += _utf16_length(common)
            # Marks that join the letter before them are counted together with it.
            rest[0] = _without(rest[0], len(common))
        if position < cursor.position():
            cursor.setPosition(position, QTextCursor.MoveMode.KeepAnchor)
            cursor.removeSelectedText()
            self.formulas.forget(position)
        base = self._base(wanted)
        self._write_spans(cursor, rest, base, _look_of(wanted))

    # Code

    def _write_lines(self, cursor: QTextCursor, code: str) -> None:
        char = self._base(CodeBlock(""))
        first, *lines = code.split("\n")
        cursor.insertText(first, char)
        if not lines:
            return
        form = cursor.blockFormat()
        padding = form.bottomMargin()
        form.setBottomMargin(0)
        cursor.setBlockFormat(form)
        form.setTopMargin(0)
        form.setProperty(SPACED, False)
        form.clearProperty(LANGUAGE)
        for line in lines[:-1]:
            cursor.insertBlock(form, char)
            cursor.insertText(line, char)
        form.setBottomMargin(padding)
        cursor.insertBlock(form, char)
        cursor.insertText(lines[-1], char)

    def _change_code(self, last: str, wanted: str) -> None:
        kept = len(_common(last, wanted))
        cursor = self._end()
        if kept < len(last):
            last_form = cursor.blockFormat()
            cursor.setPosition(cursor.position() - _utf16_length(last[kept:]), QTextCursor.MoveMode.KeepAnchor)
            cursor.removeSelectedText()
            form = cursor.blockFormat()
            form.setBottomMargin(last_form.bottomMargin())
            cursor.setBlockFormat(form)
        self._write_lines(cursor, wanted[kept:])

    def _colour(self, index: int, *, is_open: bool) -> None:
        code = self.shown[index]
        assert isinstance(code, CodeBlock)
        self.highlighter.show(index, self._marks[index].start, code.language, few_marks(code.code), is_open=is_open)

    # Tables

    def _write_table(self, cursor: QTextCursor, segment: TableBlock, gap: int) -> None:
        if len(self.shown) == 1:
            self._make_glue(cursor)
        form = QTextTableFormat()
        form.setBorder(0)
        form.setBorderCollapse(True)
        form.setCellSpacing(0)
        form.setCellPadding(0)
        form.setHeaderRowCount(1)
        form.setLeftMargin(self._style.left_of(segment.containers))
        form.setTopMargin(gap)
        table = cursor.insertTable(len(segment.rows), len(segment.alignments), form)
        for number in range(len(segment.rows)):
            self._write_row(table, segment, number)
        self._make_glue(self._end())

    def _make_glue(self, cursor: QTextCursor) -> None:
        form = QTextBlockFormat()
        form.setLineHeight(1, _FIXED)
        form.setProperty(GLUE, True)
        cursor.setBlockFormat(form)
        cursor.setBlockCharFormat(self._base(TextBlock(())))

    def _change_rows(self, table: QTextTable, last: TableBlock, wanted: TableBlock) -> None:
        count = len(last.rows)
        if added := len(wanted.rows) - count:
            table.appendRows(added)
        has_changed = False  # then so have the places of the cells that follow
        for column, (before, after) in enumerate(zip(last.rows[-1], wanted.rows[count - 1], strict=True)):
            if before != after or has_changed:
                has_changed = True
                inside = table.cellAt(count - 1, column).firstCursorPosition()
                end = table.cellAt(count - 1, column).lastCursorPosition().position()
                self.formulas.forget(inside.position())
                inside.setPosition(end, QTextCursor.MoveMode.KeepAnchor)
                inside.removeSelectedText()
                self._write_cell(table, wanted, count - 1, column)
        if added:
            for column in range(len(wanted.alignments)):
                self._frame_cell(table, wanted, count - 1, column)
            for number in range(count, len(wanted.rows)):
                self._write_row(table, wanted, number)

    def _write_row(self, table: QTextTable, segment: TableBlock, row: int) -> None:
        for column in range(len(segment.alignments)):
            self._write_cell(table, segment, row, column)
            self._frame_cell(table, segment, row, column)

    def _write_cell(self, table: QTextTable, segment: TableBlock, row: int, column: int) -> None:
        cursor = table.cellAt(row, column).firstCursorPosition()
        form = QTextBlockFormat()
        form.setAlignment(_ALIGNMENTS[segment.alignments[column]])
        form.setProperty(CONTAINERS, segment.containers)
        form.setProperty(SPACED, row == 0)
        cursor.setBlockFormat(form)
        header = TextBlock((), heading=6) if row == 0 else TextBlock(())
        base = self._base(header)
        self._write_spans(cursor, segment.rows[row][column], base, _look_of(header))

    def _frame_cell(self, table: QTextTable, segment: TableBlock, row: int, column: int) -> None:
        style = self._style
        form = QTextTableCellFormat()
        form.setTopPadding(style.px(0.4))
        form.setBottomPadding(style.px(0.4))
        side = style.px(0.7) if len(segment.alignments) <= 8 else style.px(0.3)
        form.setLeftPadding(side)
        form.setRightPadding(side)
        if row < len(segment.rows) - 1:
            form.setBottomBorder(1)
            form.setBottomBorderStyle(QTextFrameFormat.BorderStyle.BorderStyle_Solid)
            form.setBottomBorderBrush(QColor(style.theme.faint if row == 0 else style.theme.border))
        table.cellAt(row, column).setFormat(form)


def _look_of(segment: Segment) -> object:
    if isinstance(segment, CodeBlock):
        return "code"
    heading = segment.heading if isinstance(segment, TextBlock) else 0
    return heading or ("quoted" if "q" in segment.containers else "text")


def _frame_of(block: TextBlock) -> object:
    return block.containers, block.gap, block.heading, block.marker, _is_right_to_left(block)


def _first_lines(block: CodeBlock, shown: int) -> CodeBlock:
    """So much of it as is written at once, when so many lines are there."""
    most = shown + _LINES_AT_ONCE
    if block.code.count("\n") <= most:
        return block
    return CodeBlock("\n".join(block.code.split("\n", most + 1)[:-1]), block.language, block.containers, block.gap)


def _shown_marker(block: TextBlock, marker: Marker) -> str:
    if marker.checked is not None:
        return "☑" if marker.checked else "☐"
    if marker.number is not None:
        return f"{marker.number}."
    return _BULLETS[min(block.containers.count("l"), len(_BULLETS)) - 1]


def _is_right_to_left(block: TextBlock) -> bool:
    """By the first letter that has a direction."""
    for letter in spans_text(block.spans[:8])[:200]:
        kind = unicodedata.bidirectional(letter)
        if kind in ("L", "R", "AL"):
            return kind != "L"
    return False


def _without(span: TextSpan, count: int) -> TextSpan:
    text = few_marks(span.text)[count:]
    return TextSpan(text, span.bold, span.italic, span.strike, span.code, span.href)


def _common(a: str, b: str) -> str:
    if b.startswith(a):
        return a
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[:middle]):
            low = middle
        else:
            high = middle - 1
    return a[:low]


def _utf16_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def utf16_slice(text: str, start: int, end: int) -> str:
    if text.isascii():
        return text[start:end]
    return text.encode("utf-16-le", "surrogatepass")[2 * start : 2 * end].decode("utf-16-le", "replace")
