"""How an answer looks, for comparing two."""

from collections.abc import Callable

from PySide6.QtGui import QTextBlock

from app.widgets.answer_text import AnswerView
from app.widgets.answer_text.maths import DISPLAY, EM, SOURCE, TEX
from app.widgets.answer_text.writer import CODE, CONTAINERS, GLUE, INLINE_CODE, LANGUAGE, MARKER, RULE, SPACED

ViewMaker = Callable[[str], AnswerView]


def blocks(view: AnswerView) -> list[QTextBlock]:
    """All blocks of its document."""
    found = []
    block = view.document().begin()
    while block.isValid():
        found.append(block)
        block = block.next()
    return found


def look(view: AnswerView) -> list[object]:
    """Everything that decides how the blocks look, and where they are."""
    result: list[object] = []
    layout = view.document().documentLayout()
    for block in blocks(view):
        form = block.blockFormat()
        fragments: list[object] = []
        at = block.begin()
        while not at.atEnd():
            char = at.fragment().charFormat()
            fragments.append(
                (
                    at.fragment().text(),
                    char.font().toString(),
                    char.foreground().color().name(),
                    char.anchorHref(),
                    char.verticalAlignment(),
                    [char.property(name) for name in (SOURCE, TEX, DISPLAY, EM, MARKER, INLINE_CODE)],
                )
            )
            at += 1
        margins = [form.leftMargin(), form.topMargin(), form.rightMargin(), form.bottomMargin(), form.textIndent()]
        ways = [form.alignment(), form.headingLevel(), form.lineHeight(), form.layoutDirection()]
        ours = [form.property(name) for name in (CONTAINERS, CODE, LANGUAGE, RULE, GLUE, SPACED)]
        result.append((margins, ways, ours, fragments, layout.blockBoundingRect(block).getRect()))
    return result
