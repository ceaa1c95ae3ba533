"""A written document without the widget that shows it: what is drawn behind its text, plain text, and pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from PySide6.QtCore import QPointF, QRectF, QSizeF, Qt
from PySide6.QtGui import (
    QColor,
    QPagedPaintDevice,
    QPainter,
    QPen,
    QTextBlock,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextLine,
)

from app.services.formulas import Formula, Picture
from app.widgets.answer_text.blocks import MathsBlock, Segment, TableBlock, TextBlock, TextSpan
from app.widgets.answer_text.maths import OBJECT, SOURCE, formula_in
from app.widgets.answer_text.parser import StreamParser
from app.widgets.answer_text.style import MAX_VISIBLE_DEPTH, Style
from app.widgets.answer_text.writer import (
    CODE,
    CONTAINERS,
    GLUE,
    INLINE_CODE,
    LANGUAGE,
    MARKER,
    RULE,
    SPACED,
    DocumentWriter,
    utf16_slice,
)

_RADIUS = 10
_FAR = 40
"""Beyond what is visible: a card or bar that goes on there is drawn so far."""


def read_markdown(text: str) -> list[Segment]:
    parser = StreamParser()
    parser.append(text)
    parser.finish()
    return parser.finished


def formulas_in(segments: Iterable[Segment]) -> set[Formula]:
    found: set[Formula] = set()
    for segment in segments:
        spans: Iterable[TextSpan] = ()
        if isinstance(segment, MathsBlock):
            found.add(Formula(segment.tex, display=True))
        elif isinstance(segment, TextBlock):
            spans = segment.spans
        elif isinstance(segment, TableBlock):
            spans = (span for row in segment.rows for cell in row for span in cell)
        found.update(formula_in(span.tex, span.text) for span in spans if span.tex)
    return found


def write_markdown(
    document: QTextDocument, segments: Sequence[Segment], style: Style, drawn: Mapping[Formula, Picture]
) -> None:
    """Writes a text at the end of a document, for paper or a file, on any thread.

    Formulas that are not `drawn` show their source.  `print_document` draws what stands behind the text too.
    """
    writer = DocumentWriter(document, style, drawn)
    while not writer.update(segments, [], float("inf")):
        pass
    writer.highlighter.finish()


def print_document(document: QTextDocument, device: QPagedPaintDevice, style: Style) -> None:
    painter = QPainter(device)
    scale = device.logicalDpiY() / 96.0
    page = QSizeF(device.width() / scale, device.height() / scale)
    footer = style.px(2.4)
    text = QSizeF(page.width(), page.height() - footer)
    document.setPageSize(text)
    for number in range(count := document.pageCount()):
        if number:
            device.newPage()
        painter.save()
        painter.scale(scale, scale)
        if count > 1:
            painter.setFont(style.small_font)
            painter.setPen(QColor(style.theme.muted))
            below = QRectF(0, text.height(), text.width(), footer)
            painter.drawText(
                below, Qt.AlignmentFlag.AlignBottom | Qt.AlignmentFlag.AlignRight, f"{number + 1} / {count}"
            )
        shown = QRectF(QPointF(0, number * text.height()), text)
        painter.translate(0, -shown.top())
        painter.setClipRect(shown)
        paint_behind(painter, document, shown, style)
        document.drawContents(painter, shown)
        painter.restore()
    painter.end()


def plain_text(document: QTextDocument, start: int, end: int) -> str:
    """A part of a document as plain text: list markers, tabs between the cells of a table, and formulas as source."""
    parts: list[str] = []
    block = document.findBlock(start)
    row = (-1, -1)
    while block.isValid() and block.position() < end:
        form = block.blockFormat()
        if not form.property(GLUE):
            before, row = row, (-1, -1)
            if (table := QTextCursor(block).currentTable()) is not None:
                row = (table.firstPosition(), table.cellAt(block.position()).row())
            if parts:
                in_row = row == before and row != (-1, -1)
                in_table = row[0] == before[0] != -1
                parts.append("\t" if in_row else "\n\n" if form.property(SPACED) and not in_table else "\n")
            parts.append(_part_of(block, start, end))
        block = block.next()
    return "".join(parts)


def _part_of(block: QTextBlock, start: int, end: int) -> str:
    if block.blockFormat().property(RULE):
        return "---"
    parts = []
    for position, length, char in _fragments(block):
        first, last = max(start, position), min(end, position + length)
        if first >= last:
            continue
        text = utf16_slice(block.text(), first - block.position(), last - block.position())
        if marker := char.property(MARKER):
            parts.append(str(marker))
        elif OBJECT in text and (source := char.property(SOURCE)):
            parts.append(text.replace(OBJECT, str(source)))
        else:
            parts.append(text.replace("\u2028", "\n"))
    return "".join(parts)


def _fragments(block: QTextBlock) -> Iterator[tuple[int, int, QTextCharFormat]]:
    at = block.begin()
    while not at.atEnd():
        fragment = at.fragment()
        yield fragment.position(), fragment.length(), fragment.charFormat()
        at += 1


def first_block(document: QTextDocument, y: float) -> QTextBlock:
    position = document.documentLayout().hitTest(QPointF(0, y), Qt.HitTestAccuracy.FuzzyHit)
    return document.findBlock(max(0, position))


def card_bottom(block: QTextBlock, box: QRectF, style: Style) -> float:
    """Where a card of code has to end for this line of it.  Its box ends above the foot of the line, which is higher
    than its letters."""
    return box.top() + block.layout().lineCount() * style.code_line_height + block.blockFormat().bottomMargin()


def paint_behind(painter: QPainter, document: QTextDocument, exposed: QRectF, style: Style) -> None:
    """Draws what stands behind the text: the cards of code, the bars of quotes, rules, and boxes of code in lines."""
    theme, width = style.theme, document.textWidth()
    painter.save()
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    cards: dict[int, QRectF] = {}
    languages: dict[int, str] = {}
    bars: dict[tuple[str, int], QRectF] = {}
    open_bars: dict[str, tuple[str, int]] = {}
    boxes: list[QRectF] = []
    rules: list[QRectF] = []
    block = first_block(document, exposed.top() - _FAR)
    if block.previous().isValid():
        block = block.previous()
    is_first = True
    while block.isValid():
        box = document.documentLayout().blockBoundingRect(block)
        form = block.blockFormat()
        if box.top() - form.topMargin() > exposed.bottom() + _FAR:
            break
        containers = str(form.property(CONTAINERS) or "")[:MAX_VISIBLE_DEPTH]
        left = style.left_of(containers)
        number = form.property(CODE)
        if number is not None:
            if (language := form.property(LANGUAGE)) is not None:
                languages[number] = str(language)
                top = box.top() - style.card_top
                cards[number] = QRectF(left, top, width - left, card_bottom(block, box, style) - top)
                box = cards[number]
            elif number in cards:
                cards[number].setBottom(card_bottom(block, box, style))
            else:
                top = box.top() - _FAR
                cards[number] = QRectF(left, top, width - left, card_bottom(block, box, style) - top)
            box = box.united(cards[number])
        if form.property(RULE):
            rules.append(QRectF(left, box.center().y(), width - left, 1))
        if not form.property(GLUE):
            inside = {containers[:end] for end in range(1, len(containers) + 1) if containers[end - 1] == "q"}
            for gone in open_bars.keys() - inside:
                del open_bars[gone]
            for quote in inside:
                if quote not in open_bars:
                    open_bars[quote] = (quote, block.position())
                    top = box.top() - (_FAR if is_first and _is_inside(block.previous(), quote) else 0)
                    bars[open_bars[quote]] = QRectF(style.left_of(quote[:-1]), top, 3, box.bottom() - top)
                bars[open_bars[quote]].setBottom(max(bars[open_bars[quote]].bottom(), box.bottom()))
        boxes += _boxes(block, box, exposed)
        is_first = False
        block = block.next()
    _paint_cards(painter, cards, languages, style)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(QColor(theme.border))
    for bar in bars.values():
        painter.drawRoundedRect(bar, 1.5, 1.5)
    for rule in rules:
        painter.fillRect(rule, QColor(theme.border))
    painter.setBrush(style.inline_code_background)
    for box in boxes:
        painter.drawRoundedRect(box, 4, 4)
    painter.restore()


def _paint_cards(painter: QPainter, cards: dict[int, QRectF], languages: dict[int, str], style: Style) -> None:
    theme = style.theme
    for number, card in cards.items():
        painter.setPen(QPen(QColor(theme.border), 1))
        painter.setBrush(QColor(theme.sunken))
        painter.drawRoundedRect(card.adjusted(0.5, 0.5, -0.5, -0.5), _RADIUS, _RADIUS)
        if number in languages:
            line = card.top() + style.card_header
            painter.drawLine(QPointF(card.left() + 1, line), QPointF(card.right() - 1, line))
            painter.setFont(style.small_font)
            painter.setPen(QColor(theme.muted))
            room = QRectF(card.left() + style.card_padding, card.top(), card.width() * 0.6, style.card_header)
            name = painter.fontMetrics().elidedText(languages[number], Qt.TextElideMode.ElideRight, int(room.width()))
            painter.drawText(room, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, name)


def _is_inside(block: QTextBlock, quote: str) -> bool:
    return block.isValid() and str(block.blockFormat().property(CONTAINERS) or "").startswith(quote)


def _boxes(block: QTextBlock, box: QRectF, exposed: QRectF) -> list[QRectF]:
    """The boxes behind inline code, one per line that it touches."""
    if box.bottom() < exposed.top() or block.blockFormat().property(CODE) is not None:
        return []
    layout = block.layout()
    origin = box.topLeft()
    found = []
    for position, length, char in _fragments(block):
        if not char.property(INLINE_CODE):
            continue
        first, last = position - block.position(), position - block.position() + length
        for number in range(layout.lineCount()):
            line = layout.lineAt(number)
            end = line.textStart() + line.textLength()
            if end <= first or line.textStart() >= last:
                continue
            left, right = _x(line, max(first, line.textStart())), _x(line, min(last, end))
            height = char.font().pixelSize() * 1.5
            middle = line.y() + line.ascent() - char.font().pixelSize() * 0.32
            one = QRectF(min(left, right), middle - height / 2, abs(right - left), height)
            found.append(one.translated(origin).adjusted(-2, 0, 2, 0))
    return found


def _x(line: QTextLine, position: int) -> float:
    # PySide6 returns (x, position), unlike its stubs.
    found: object = line.cursorToX(position)
    return float(found[0] if isinstance(found, tuple) else found)  # type: ignore[arg-type]
