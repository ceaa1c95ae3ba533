"""Writes spans and text blocks into a QTextDocument."""

from __future__ import annotations

from collections.abc import Iterable

from PySide6.QtGui import QColor, QFont, QTextBlockFormat, QTextCharFormat, QTextCursor

from app.widgets.markdown_view.markers import number_width
from app.widgets.markdown_view.segments import TextBlock, TextSpan, quote_part
from app.widgets.markdown_view.style import MAX_VISIBLE_DEPTH, Style
from engine.common.plain_text import few_marks


def base_format(font: QFont, colour: str) -> QTextCharFormat:
    result = QTextCharFormat()
    result.setFont(font)
    result.setForeground(QColor(colour))
    return result


def insert_spans(cursor: QTextCursor, spans: Iterable[TextSpan], base: QTextCharFormat, style: Style) -> None:
    """Inserts spans at the cursor, each in `base` with its own attributes."""
    for span in spans:
        char = QTextCharFormat(base)
        if span.code:
            px = base.font().pixelSize()
            char.setFont(style.code_font(round((px if px > 0 else style.body_px) * 0.92)))
        if span.bold:
            char.setFontWeight(QFont.Weight.Bold)
        if span.italic:
            char.setFontItalic(True)
        if span.strike:
            char.setFontStrikeOut(True)
        if span.href:
            char.setAnchor(True)
            char.setAnchorHref(span.href)
            char.setForeground(QColor(style.theme.accent_text))
            char.setFontUnderline(True)
        cursor.insertText(few_marks(span.text).replace("\n", "\u2028"), char)


def append_block(cursor: QTextCursor, block: TextBlock, gap: int, is_first: bool, style: Style) -> None:
    """Appends `block`; `cursor` is at the end of the document."""
    theme = style.theme
    font = style.heading_font(block.heading) if block.heading else style.font
    muted = "q" in block.containers and not block.heading
    char = base_format(font, theme.muted if muted else theme.text)
    form = QTextBlockFormat()
    form.setTopMargin(gap)
    form.setLineHeight(style.line_distance(font), QTextBlockFormat.LineHeightTypes.LineDistanceHeight.value)
    if block.heading:
        form.setHeadingLevel(block.heading)
    # The pane paints the marker into the indentation.
    form.setIndent(list_depth(block))
    if block.marker is not None:
        form.setLeftMargin(max(0, number_width(block.marker, style) - style.indent))
    if is_first:
        cursor.setBlockFormat(form)
        cursor.setBlockCharFormat(char)
    else:
        cursor.insertBlock(form, char)
    insert_spans(cursor, block.spans, char, style)


def list_depth(block: TextBlock) -> int:
    """How many lists indent a block within its block quote."""
    return min(len(block.containers) - len(quote_part(block.containers)), MAX_VISIBLE_DEPTH)
