"""A run of paragraphs, headings and list items in one document."""

from __future__ import annotations

import math
from dataclasses import dataclass

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QTextCursor, QTextLine
from PySide6.QtWidgets import QWidget

from app.widgets.markdown_view.document_pane import DocumentPane, plain
from app.widgets.markdown_view.markers import PlacedMarker, paint_marker
from app.widgets.markdown_view.segments import Marker, Segment, TextBlock, quote_part
from app.widgets.markdown_view.style import Style
from app.widgets.markdown_view.text_writer import append_block, list_depth

MAX_CHARACTERS = 16_000  # per run, so that its layout stays fast
_BLOCK = 100  # characters that take as long to lay out as what a block takes by itself


@dataclass(frozen=True, slots=True)
class RunState:
    """How far a run had been written, to rewind to it."""

    position: int = 0
    blocks: int = 0
    code_ranges: int = 0
    markers: int = 0
    links: int = 0


class TextPane(DocumentPane):
    """Consecutive text blocks of one block quote (or none)."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.containers = ""
        self._links = 0
        self._blocks = 0
        self._code_ranges: list[tuple[int, int]] = []
        self._markers: dict[int, tuple[Marker, int]] = {}  # block number -> marker and depth
        self._code_boxes: list[QRectF] | None = None
        self._placed_markers: list[PlacedMarker] = []
        self._style: Style | None = None

    # The pane interface

    def begin(self, segment: Segment, style: Style) -> None:
        """Starts an empty run in this style, in the quote that contains `segment`."""
        self.containers = quote_part(segment.containers)
        self._style = style
        self.rewind(RunState())
        self.document().setDefaultFont(style.font)
        self.document().setIndentWidth(style.indent)

    def accepts(self, segment: Segment) -> bool:
        return (
            isinstance(segment, TextBlock)
            and quote_part(segment.containers) == self.containers
            and self.document().characterCount() + _BLOCK * self._blocks < MAX_CHARACTERS
        )

    def add(self, segment: Segment, gap: int) -> None:
        assert isinstance(segment, TextBlock)
        assert self._style is not None
        cursor = QTextCursor(self.document())
        cursor.beginEditBlock()
        cursor.movePosition(QTextCursor.MoveOperation.End)
        append_block(cursor, segment, gap if self._blocks else 0, self._blocks == 0, self._style)
        cursor.endEditBlock()
        if segment.marker is not None:
            self._markers[self._blocks] = segment.marker, list_depth(segment)
        self._blocks += 1
        end = cursor.position()
        position = end - sum(_utf16_length(span.text) for span in segment.spans)
        for span in segment.spans:
            length = _utf16_length(span.text)
            if span.code:
                self._code_ranges.append((position, position + length))
            self._links += bool(span.href)
            position += length
        self._on_changed()

    def state(self) -> RunState:
        position = self.document().characterCount() - 1
        return RunState(position, self._blocks, len(self._code_ranges), len(self._markers), self._links)

    def rewind(self, state: RunState) -> None:
        """Removes what was written after `state`."""
        if state.blocks == 0:
            if self.document().characterCount() > 1 or self._blocks:
                self.document().clear()
        else:
            cursor = QTextCursor(self.document())
            cursor.setPosition(state.position)
            form, char = cursor.blockFormat(), cursor.blockCharFormat()
            cursor.movePosition(QTextCursor.MoveOperation.End, QTextCursor.MoveMode.KeepAnchor)
            cursor.removeSelectedText()
            # When an empty block merges with what is removed below it, Qt keeps the latter's format.
            cursor.setBlockFormat(form)
            cursor.setBlockCharFormat(char)
        del self._code_ranges[state.code_ranges :]
        while len(self._markers) > state.markers:
            self._markers.popitem()
        self._links, self._blocks = state.links, state.blocks
        self._on_changed()

    def height_for(self, width: int) -> int:
        if self.lineWrapColumnOrWidth() != width:
            self.set_wrap_width(width)
            self._code_boxes = None
        return math.ceil(self.document().size().height())

    def browser(self) -> DocumentPane:
        return self

    # Selection

    def selected_text(self) -> str:
        """The selected text; a list item selected from its beginning includes its marker."""
        cursor = self.textCursor()
        start, end = cursor.selectionStart(), cursor.selectionEnd()
        if start == end:
            return ""
        lines = []
        block = self.document().findBlock(start)
        while block.isValid() and block.position() <= end:
            offset = block.position()
            text = block.text()
            part = _utf16_slice(text, max(0, start - offset), max(0, end - offset))
            if start <= offset and (found := self._markers.get(block.blockNumber())):
                marker, depth = found
                part = "  " * (depth - 1) + f"{marker.text()} {part}"
            lines.append(plain(part))
            block = block.next()
        return "\n".join(lines)

    # Painting

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._style is not None and (self._code_ranges or self._markers):
            exposed = QRectF(event.rect())
            painter = QPainter(self.viewport())
            painter.setRenderHint(QPainter.RenderHint.Antialiasing)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(self._style.inline_code_background)
            for box in self._boxes():
                if box.intersects(exposed):
                    painter.drawRoundedRect(box, 4, 4)
            for placed in self._placed_markers:
                if placed.box(self._style).intersects(exposed):
                    paint_marker(painter, placed, self._style)
            painter.end()
        super().paintEvent(event)

    def _boxes(self) -> list[QRectF]:
        """The boxes behind inline code, one per line that it touches; also places the markers."""
        if self._code_boxes is None:
            self._code_boxes = [box for start, end in self._code_ranges for box in self._boxes_of(start, end)]
            self._placed_markers = [self._place(number, *found) for number, found in self._markers.items()]
        return self._code_boxes

    def _place(self, number: int, marker: Marker, depth: int) -> PlacedMarker:
        block = self.document().findBlockByNumber(number)
        line = block.layout().lineAt(0)
        corner = self.document().documentLayout().blockBoundingRect(block).topLeft()
        is_right_to_left = block.textDirection() == Qt.LayoutDirection.RightToLeft
        edge = corner.x() + (line.x() + line.width() if is_right_to_left else line.x())
        return PlacedMarker(marker, depth, edge, corner.y() + line.y() + line.ascent(), is_right_to_left)

    def _boxes_of(self, start: int, end: int) -> list[QRectF]:
        block = self.document().findBlock(start)
        layout = block.layout()
        origin = self.document().documentLayout().blockBoundingRect(block).topLeft()
        first, last = start - block.position(), end - block.position()
        boxes = []
        for index in range(layout.lineCount()):
            line = layout.lineAt(index)
            line_end = line.textStart() + line.textLength()
            if line_end <= first or line.textStart() >= last:
                continue
            left = _x(line, max(first, line.textStart()))
            right = _x(line, min(last, line_end))
            top = line.y() + line.ascent() + line.descent() - line.height()
            box = QRectF(min(left, right), top, abs(right - left), line.height()).translated(origin)
            boxes.append(box.adjusted(-2, 0, 2, 0))
        return boxes

    def _on_changed(self) -> None:
        self._code_boxes = None
        policy = Qt.FocusPolicy.StrongFocus if self._links else Qt.FocusPolicy.ClickFocus
        if self.focusPolicy() != policy:
            self.setFocusPolicy(policy)


def _x(line: QTextLine, position: int) -> float:
    # PySide6 returns (x, position), unlike its stubs.
    found: object = line.cursorToX(position)
    return float(found[0] if isinstance(found, tuple) else found)  # type: ignore[arg-type]


def _utf16_length(text: str) -> int:
    """Length in UTF-16 code units, as QTextDocument counts."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def _utf16_slice(text: str, start: int, end: int) -> str:
    if text.isascii():
        return text[start:end]
    return text.encode("utf-16-le")[2 * start : 2 * end].decode("utf-16-le", "replace")
