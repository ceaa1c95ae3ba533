"""Text that comes out as it was given, any text at all, and that all of it fits its width."""

import pytest
from PySide6.QtCore import QRect
from PySide6.QtGui import QAccessible, QFont
from PySide6.QtWidgets import QApplication, QScrollArea, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.theme import LIGHT, ThemeController
from app.widgets.answer_text import AnswerView
from app.widgets.answer_text.parser import MAX_COLUMNS
from tests.app.answer_text.looks import ViewMaker, look
from tests.unit.markdown_texts import EVERYTHING


def test_the_source_comes_back_as_it_was_given(make_view: ViewMaker) -> None:
    view = make_view("a\r\n\x00*b*")
    assert view.markdown() == "a\r\n\x00*b*"
    view.append_markdown(" c")
    assert view.markdown() == "a\r\n\x00*b* c"
    assert view.plain_text() == "a\n\ufffdb c"


def test_screen_readers_get_the_text_with_its_markers(make_view: ViewMaker) -> None:
    view = make_view("# Title\n\nSome **bold** words\n\n- item\n\n```\ncode\n```")
    assert view.accessibleName() == "Answer"
    assert view.accessibleDescription() == "Title\n\nSome bold words\n\n- item\n\ncode"
    read = QAccessible.queryAccessibleInterface(view)
    assert read.text(QAccessible.Text.Value).split() == ["Title", "Some", "bold", "words", "•", "item", "code"]


def test_the_height_follows_the_width(make_view: ViewMaker) -> None:
    view = make_view("word " * 400)
    assert view.hasHeightForWidth()
    narrow, wide = view.heightForWidth(200), view.heightForWidth(900)
    assert narrow > 3 * wide
    assert view.heightForWidth(200) == narrow


def test_a_layout_that_lags_behind_cannot_squeeze_the_answer(qtbot: QtBot) -> None:
    outer = QWidget()
    qtbot.addWidget(outer)
    layout = QVBoxLayout(outer)
    view = AnswerView()
    layout.addWidget(view)
    outer.resize(400, 200)
    outer.show()
    view.append_markdown("word " * 300)
    view.flush()
    # The window is lower than the answer: it becomes as high as the answer needs rather than cut its last lines off.
    qtbot.waitUntil(lambda: view.height() >= view.heightForWidth(view.width()))


def test_in_a_scroll_area_only_the_area_scrolls(qtbot: QtBot) -> None:
    area = QScrollArea()
    qtbot.addWidget(area)
    content = QWidget()
    layout = QVBoxLayout(content)
    view = AnswerView()
    layout.addWidget(view)
    layout.addStretch()
    area.setWidget(content)
    area.setWidgetResizable(True)
    area.resize(500, 300)
    area.show()
    view.set_markdown(EVERYTHING + "\n\n" + "word " * 900 + "treasure")
    view.flush()
    qtbot.waitUntil(lambda: area.verticalScrollBar().maximum() > 0)
    for width in (300, 700, 420):
        area.resize(width, 300)
        qtbot.waitUntil(lambda: view.height() == view.heightForWidth(view.width()))
        assert view.verticalScrollBar().maximum() == 0
    [_] = view.find_matches("treasure")
    view.show_match(0)
    assert area.verticalScrollBar().value() > area.verticalScrollBar().maximum() * 0.9


def test_a_table_too_wide_for_any_wrapping_can_be_scrolled(make_view: ViewMaker) -> None:
    cells = "|" + "abc|" * 90
    view = make_view(f"{cells}\n|{'---|' * 90}\n{cells}")
    view.show()
    assert view.horizontalScrollBar().maximum() > 0
    assert view.verticalScrollBar().maximum() == 0


def test_themes_and_fonts_change_everything_at_once(make_view: ViewMaker, theme: ThemeController) -> None:
    view = make_view(EVERYTHING)
    light = look(view)
    view.selectAll()
    selected = view.selected_text()
    theme.set_choice("dark")
    view.flush()
    assert LIGHT.text.lower() not in repr(look(view)).lower()
    assert view.selected_text() == selected
    heights_of_sizes = []
    for size in (14, 22, 14):
        font = QFont(view.font())
        font.setPixelSize(size)
        view.setFont(font)
        view.flush()
        heights_of_sizes.append(view.heightForWidth(640))
    assert heights_of_sizes[0] == heights_of_sizes[2] < heights_of_sizes[1]
    theme.set_choice("light")
    view.flush()
    assert look(view) == light


def test_a_table_of_thousands_of_columns_is_shown_as_it_was_written(make_view: ViewMaker) -> None:
    line = f"|{'|'.join(f'c{number}' for number in range(MAX_COLUMNS + 1))}|"
    text = f"{line}\n|{'---|' * (MAX_COLUMNS + 1)}\n{line}\n"
    view = make_view(text)
    assert view.document().rootFrame().childFrames() == []
    assert view.plain_text().strip() == text.strip()


def test_a_letter_with_thousands_of_marks_is_shown_with_few_and_copied_whole(make_view: ViewMaker) -> None:
    dense = "a" + "\u0301\u0334" * 2000 + "b\u0301"
    view = make_view(f"{dense}\n\n```\n{dense}\n```\n\n| {dense} |\n|---|\n| x |\n")
    shown = view.toPlainText()
    assert shown.count("a" + "\u0301\u0334" * 15 + "b\u0301") == 3
    assert len(shown) < 200
    assert view.markdown().count(dense) == 3
    [button] = view.copy_buttons
    assert button.code == dense


@pytest.mark.parametrize(
    "text",
    [
        "x" * 300_000,
        "word " * 60_000,
        "line\n" * 5_000,
        "[" * 10_000,
        "*" * 10_000,
        "$" * 10_000,
        "$a$ " * 3_000,
        "$$\n" * 3_000,
        "http://a.b/c " * 3_000,
        "http://" + "a" * 50_000,
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
    view = make_view("")
    for start in range(0, len(text), 20_011):
        view.append_markdown(text[start : start + 20_011])
        QApplication.processEvents()
    view.finish()
    view.flush()
    assert view.heightForWidth(640) > 0
    view.resize(640, view.heightForWidth(640))
    for top in (0, view.heightForWidth(640) - 400):
        assert not view.grab(QRect(0, top, 640, 400)).isNull()
