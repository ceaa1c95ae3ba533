"""Heights, widths, scrolling, themes and fonts."""

from __future__ import annotations

from PySide6.QtGui import QFont
from PySide6.QtWidgets import QScrollArea, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.theme import LIGHT, ThemeController
from app.widgets.markdown_view import MarkdownView
from app.widgets.markdown_view.code_card import CodeCard
from app.widgets.markdown_view.document_pane import DocumentPane
from app.widgets.markdown_view.stream_parser import MAX_COLUMNS
from app.widgets.markdown_view.table_pane import TablePane
from app.widgets.markdown_view.text_pane import TextPane
from tests.app.markdown.markdown_looks import ViewMaker, look
from tests.unit.markdown_texts import EVERYTHING


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
    view = MarkdownView()
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
    view = MarkdownView()
    layout.addWidget(view)
    layout.addStretch()
    area.setWidget(content)
    area.setWidgetResizable(True)
    area.resize(500, 300)
    area.show()
    view.set_markdown(EVERYTHING)
    view.flush()
    qtbot.waitUntil(lambda: area.verticalScrollBar().maximum() > 0)
    qtbot.waitUntil(lambda: view.height() == view.heightForWidth(view.width()))
    for browser in view.column.browsers():
        assert browser.verticalScrollBar().maximum() == 0
    for width in (300, 700, 420):
        area.resize(width, 300)
        qtbot.waitUntil(lambda: view.height() == view.heightForWidth(view.width()))
        bottom = max(pane.geometry().bottom() for pane in view.column.panes)
        assert bottom < view.height()


def test_wide_tables_and_code_scroll_sideways_and_break_nothing(make_view: ViewMaker) -> None:
    wide = " | ".join(f"a_long_column_name_{number}" for number in range(12))
    rule = " | ".join("---" for _ in range(12))
    view = make_view(f"| {wide} |\n| {rule} |\n| {wide} |\n\n```\n{'x' * 500}\n```\n\n{'y' * 500}")
    view.resize(320, 600)
    view.show()
    table, code, text = view.column.panes
    assert isinstance(table, TablePane)
    assert isinstance(code, CodeCard)
    assert isinstance(text, TextPane)
    for pane in view.column.panes:
        assert pane.geometry().right() < view.width()
    assert table.horizontalScrollBar().maximum() > 0
    assert code.browser().horizontalScrollBar().maximum() > 0
    assert text.document().idealWidth() <= 320


def test_themes_and_fonts_change_everything_at_once(make_view: ViewMaker, theme: ThemeController) -> None:
    view = make_view(EVERYTHING)
    light = look(view)
    theme.set_choice("dark")
    view.flush()
    assert LIGHT.text.lower() not in "".join(content for _, _, content in look(view)).lower()
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
    assert [kind for kind, _, _ in look(view)] == [kind for kind, _, _ in light]


def test_a_table_of_thousands_of_columns_is_shown_as_it_was_written(make_view: ViewMaker) -> None:
    line = f"|{'|'.join(f'c{number}' for number in range(MAX_COLUMNS + 1))}|"
    text = f"{line}\n|{'---|' * (MAX_COLUMNS + 1)}\n{line}\n"
    view = make_view(text)
    assert not view.findChildren(TablePane)
    assert view.plain_text().strip() == text.strip()


def test_long_tables_and_lists_and_dense_marks_are_laid_out_in_parts(make_view: ViewMaker) -> None:
    table = "|a|b|\n|---|---|\n" + "".join(f"|{number}|x|\n" for number in range(600))
    items = "".join(f"- {number}\n" for number in range(400))
    marks = "**a** " * 600
    view = make_view(f"{table}\n{items}\n\n{marks}\n")
    tables, texts = view.findChildren(TablePane), view.findChildren(TextPane)
    rows = [pane._table.rows() for pane in tables if pane._table is not None]
    assert len(rows) > 1
    assert max(rows) < 300
    assert sum(rows) == 600 + len(rows)  # each has the header
    assert max(pane.document().blockCount() for pane in texts) < 200
    assert sum(pane.document().blockCount() for pane in texts) == 401
    assert marks.strip() in texts[-1].toPlainText()


def test_a_letter_with_thousands_of_marks_is_shown_with_few_and_copied_whole(make_view: ViewMaker) -> None:
    dense = "a" + "\u0301\u0334" * 5000 + "b\u0301"
    view = make_view(f"{dense}\n\n```\n{dense}\n```\n\n| {dense} |\n|---|\n| x |\n")
    shown = [pane.toPlainText() for pane in view.findChildren(DocumentPane)]
    assert len(shown) == 3
    assert all("a" + "\u0301\u0334" * 15 + "b\u0301" in each and len(each) < 50 for each in shown)
    assert view.markdown().count(dense) == 3
    (card,) = view.findChildren(CodeCard)
    assert card.code == dense
