"""Text that comes out as it was given, and any text at all."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QRect
from PySide6.QtGui import QAccessible
from PySide6.QtWidgets import QApplication

from tests.app.markdown.markdown_looks import ViewMaker
from tests.unit.markdown_texts import EVERYTHING


def test_the_source_comes_back_as_it_was_given(make_view: ViewMaker) -> None:
    view = make_view("a\r\n\x00*b*")
    assert view.markdown() == "a\r\n\x00*b*"
    view.append_markdown(" c")
    assert view.markdown() == "a\r\n\x00*b* c"
    assert view.plain_text() == "a\n\ufffdb c"


def test_plain_text_is_up_to_date_before_anything_is_drawn(make_view: ViewMaker) -> None:
    view = make_view()
    view.append_markdown("# One\n\n**tw")
    view.append_markdown("o**")
    assert view.plain_text() == "One\n\ntwo"


def test_setting_replaces(make_view: ViewMaker) -> None:
    view = make_view(EVERYTHING)
    view.set_markdown("only this")
    view.flush()
    assert view.plain_text() == "only this"
    assert len(view.column.panes) == 1
    view.set_markdown("")
    view.flush()
    assert view.column.panes == []


def test_screen_readers_get_the_plain_text(make_view: ViewMaker) -> None:
    view = make_view("# Title\n\nSome **bold** words\n\n```\ncode\n```")
    assert view.accessibleName() == "Answer"
    assert view.accessibleDescription() == "Title\n\nSome bold words\n\ncode"
    text, code = (QAccessible.queryAccessibleInterface(browser) for browser in view.column.browsers())
    assert text.text(QAccessible.Text.Value).split() == ["Title", "Some", "bold", "words"]
    assert code.text(QAccessible.Text.Value) == "code"
    assert code.text(QAccessible.Text.Name) == "Code"


@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        "word " * 60_000,
        "line\n" * 5_000,
        "[" * 10_000,
        "*" * 10_000,
        "> " * 400 + "deep",
        "- " * 400 + "deep",
        "".join(f"{'  ' * depth}- level {depth}\n" for depth in range(60)),
        "```python\n" + "x = '''" * 2_000,
        "| a " * 300 + "|\n" + "|---" * 300 + "|\n" + "| b " * 300 + "|",
        "\x00\x01\x02\x1b[31m \ufffc \ufdd0\ufdd1 \u2028\u2029 \ud800 \ue000 \U0010ffff",
        "שלום *עולם*\n\n1. أول\n2. ثان\n\n- [x] مهمة\n\n`קוד` 日本語 한국어 👩‍👩‍👧‍👦 🏳️‍🌈 é",
        "\u202e override \u2066 isolate",
        "a\u0301" * 3_000,
    ],
    ids=lambda text: ascii(text[:6]) if isinstance(text, str) else None,
)
def test_any_text_is_shown(make_view: ViewMaker, text: str) -> None:
    view = make_view()
    for start in range(0, len(text), 20_011):
        view.append_markdown(text[start : start + 20_011])
        QApplication.processEvents()
    view.finish()
    view.flush()
    assert view.heightForWidth(640) > 0
    view.resize(640, view.heightForWidth(640))
    for top in (0, view.heightForWidth(640) - 400):
        assert not view.grab(QRect(0, top, 640, 400)).isNull()
