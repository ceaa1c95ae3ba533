"""The Markdown view: what streams in looks in the end like what is set at once, is drawn once, and loads nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from PySide6.QtCore import QEvent, QPoint, QPointF, QRect, Qt, QUrl
from PySide6.QtGui import QAccessible, QColor, QFont, QGuiApplication, QImage, QMouseEvent, QTextDocument
from PySide6.QtWidgets import QApplication, QScrollArea, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.theme import DARK, LIGHT
from app.widgets.markdown_view import MarkdownView
from app.widgets.markdown_view.code_card import CodeCard
from app.widgets.markdown_view.column import Pane
from app.widgets.markdown_view.document_pane import DocumentPane
from app.widgets.markdown_view.table_pane import TablePane
from app.widgets.markdown_view.text_pane import TextPane
from tests.unit.markdown_texts import EVERYTHING, chunked_texts

ViewMaker = Callable[[str], MarkdownView]


@pytest.fixture
def make_view(qtbot: QtBot) -> ViewMaker:
    views = []  # held here, or the garbage collector may take one away while pytest-qt handles its last events

    def make(text: str = "") -> MarkdownView:
        view = MarkdownView()
        qtbot.addWidget(view)
        view.resize(640, 480)
        if text:
            view.set_markdown(text)
            view.flush()
        views.append(view)
        return view

    return make


@pytest.fixture
def shared_view(qtbot: QtBot) -> tuple[MarkdownView, MarkdownView]:
    views = MarkdownView(), MarkdownView()
    for view in views:
        qtbot.addWidget(view)
        view.resize(640, 480)
    return views


def look(view: MarkdownView) -> list[tuple[str, str, str]]:
    """Everything that decides how the panes look."""
    panes: list[Pane] = view.column.panes
    result = []
    for pane in panes:
        browser = pane.browser()
        content = browser.toHtml() if browser is not None else ""
        if isinstance(pane, TextPane):
            content += repr(pane.state())
        result.append((type(pane).__name__, pane.containers, content))
    return result


def heights(view: MarkdownView) -> list[int]:
    return [pane.geometry().top() for pane in view.column.panes] + [view.heightForWidth(view.width())]


# The text


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


def test_streaming_looks_like_the_whole_at_every_step(make_view: ViewMaker) -> None:
    view = make_view()
    chooser = random.Random(3)
    start = 0
    while start < len(EVERYTHING):
        end = start + chooser.randint(1, 9)
        view.append_markdown(EVERYTHING[start:end])
        view.flush()
        start = end
    view.finish()
    view.flush()
    whole = make_view(EVERYTHING)
    assert look(view) == look(whole)
    assert heights(view) == heights(whole)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunked_texts())
def test_streaming_any_blocks_looks_like_the_whole(
    shared_view: tuple[MarkdownView, MarkdownView], case: tuple[str, list[str]]
) -> None:
    text, chunks = case
    streamed, whole = shared_view
    streamed.set_markdown("")
    streamed.flush()
    for chunk in chunks:
        streamed.append_markdown(chunk)
        streamed.flush()
    streamed.finish()
    streamed.flush()
    whole.set_markdown("")
    whole.flush()
    whole.set_markdown(text)
    whole.flush()
    assert look(streamed) == look(whole)
    assert heights(streamed) == heights(whole)


def test_updates_come_by_themselves(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view()
    view.append_markdown("hello")
    qtbot.waitUntil(lambda: len(view.column.panes) == 1)
    view.append_markdown(" there\n\n---\n")
    view.finish()
    qtbot.waitUntil(lambda: len(view.column.panes) == 2)


def test_finished_blocks_are_drawn_once(make_view: ViewMaker) -> None:
    view = make_view()
    for number in range(40):
        view.append_markdown(f"Paragraph {number} has some words in it.\n\n- and a list\n- of two\n\n")
        view.flush()
    # A paragraph, its list and the items of the list: each written again only while it is the open end.
    assert view.column.written_segments <= 40 * 3 * 2
    characters = len(view.markdown())
    assert view.parser.parsed_characters <= 8 * characters


def test_a_streamed_answer_costs_its_open_block_only(make_view: ViewMaker) -> None:
    view = make_view()
    words = EVERYTHING.replace("[late]", "late").split(" ")
    tokens = [word + " " for word in words * 6][:512]
    costs = []
    for token in tokens:
        before = view.parser.parsed_characters, view.column.written_segments
        view.append_markdown(token)
        view.flush()
        costs.append(
            (view.parser.parsed_characters - before[0], view.column.written_segments - before[1]),
        )
    longest_block = 400
    assert max(parsed for parsed, _ in costs) <= 4 * longest_block
    assert max(written for _, written in costs) <= 8
    assert sum(written for _, written in costs) <= 3 * len(tokens)


def test_code_that_grows_keeps_its_card(make_view: ViewMaker) -> None:
    view = make_view()
    view.append_markdown("Look:\n\n```python\nx = 1")
    view.flush()
    [_, card] = view.column.panes
    for _ in range(5):
        view.append_markdown("\ny = 2")
        view.flush()
    view.append_markdown("\n```\n\nDone.")
    view.finish()
    view.flush()
    assert view.column.panes[1] is card
    assert isinstance(card, CodeCard)
    assert card.code == "x = 1" + "\ny = 2" * 5


def test_a_selection_survives_streaming(make_view: ViewMaker) -> None:
    view = make_view()
    view.append_markdown("First words.\n\nSecond")
    view.flush()
    view.column.browsers()[0].select(0, 5)
    view.append_markdown(" words go on.\n\nThird")
    view.flush()
    assert view.selected_text() == "First"


# Links, images and HTML


def click(pane: DocumentPane, at: QPoint) -> None:
    for kind, buttons in (
        (QEvent.Type.MouseButtonPress, Qt.MouseButton.LeftButton),
        (QEvent.Type.MouseButtonRelease, Qt.MouseButton.NoButton),
    ):
        event = QMouseEvent(
            kind,
            QPointF(at),
            QPointF(pane.viewport().mapToGlobal(at)),
            Qt.MouseButton.LeftButton,
            buttons,
            Qt.KeyboardModifier.NoModifier,
        )
        QApplication.sendEvent(pane.viewport(), event)


def test_a_link_is_announced_and_not_opened(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("[manual](https://example.org/manual) and text")
    view.show()
    pane = view.column.browsers()[0]
    with qtbot.waitSignal(view.link_activated) as signal:
        click(pane, QPoint(10, 10))
    assert signal.args == [QUrl("https://example.org/manual")]
    assert pane.source().isEmpty()


def test_links_are_reached_by_the_keyboard(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("Read the [manual](https://example.org/manual).")
    view.show()
    pane = view.column.browsers()[0]
    assert pane.focusPolicy() == Qt.FocusPolicy.StrongFocus
    pane.setFocus(Qt.FocusReason.TabFocusReason)
    qtbot.keyClick(pane, Qt.Key.Key_Tab)
    with qtbot.waitSignal(view.link_activated):
        qtbot.keyClick(pane, Qt.Key.Key_Return)


def test_nothing_is_ever_loaded(make_view: ViewMaker, tmp_path: object) -> None:
    picture = QImage(4, 4, QImage.Format.Format_RGB32)
    picture.fill(QColor("red"))
    path = f"{tmp_path}/p.png"
    assert picture.save(path)
    view = make_view(
        f"![a]({path}) ![b](file://{path}) <img src='{path}'> ![c](http://127.0.0.1:9/x.png)\n\n```\nx\n```"
    )
    kinds = QTextDocument.ResourceType
    for browser in view.column.browsers():
        for kind in (kinds.ImageResource, kinds.HtmlResource, kinds.StyleSheetResource):
            assert browser.loadResource(kind.value, QUrl.fromLocalFile(path)) is None
            assert browser.document().resource(kind.value, QUrl.fromLocalFile(path)) is None
        assert "<img" not in browser.toHtml()
    assert "[image: c]" in view.plain_text()


# Selecting and copying


def test_select_all_and_copy(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("A *b*\n\n- c\n- d\n\n```\ne\n```")
    view.show()
    qtbot.keyClick(view, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
    assert view.selected_text() == "A b\n- c\n- d\n\ne"
    qtbot.keyClick(view, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QGuiApplication.clipboard().text() == "A b\n- c\n- d\n\ne"


def test_copying_without_a_selection_takes_the_whole_answer(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("A *b*")
    view.show()
    qtbot.keyClick(view, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QGuiApplication.clipboard().text() == "A *b*"


def drag(source: DocumentPane, start: QPoint, target: QWidget, end: QPoint) -> None:
    def send(kind: QEvent.Type, global_at: QPoint, buttons: Qt.MouseButton) -> None:
        at = source.viewport().mapFromGlobal(global_at)
        button = Qt.MouseButton.NoButton if kind == QEvent.Type.MouseMove else Qt.MouseButton.LeftButton
        event = QMouseEvent(kind, QPointF(at), QPointF(global_at), button, buttons, Qt.KeyboardModifier.NoModifier)
        QApplication.sendEvent(source.viewport(), event)

    begin, finish = source.viewport().mapToGlobal(start), target.mapToGlobal(end)
    send(QEvent.Type.MouseButtonPress, begin, Qt.MouseButton.LeftButton)
    send(QEvent.Type.MouseMove, begin + QPoint(30, 0), Qt.MouseButton.LeftButton)
    send(QEvent.Type.MouseMove, finish, Qt.MouseButton.LeftButton)
    send(QEvent.Type.MouseButtonRelease, finish, Qt.MouseButton.NoButton)


def test_dragging_selects_over_several_panes(make_view: ViewMaker) -> None:
    view = make_view("First paragraph\n\n```\ncode here\n```\n\nLast paragraph")
    view.show()
    first, code, last = view.column.browsers()
    drag(first, QPoint(0, 8), last.viewport(), QPoint(last.width() - 1, last.height() - 2))
    assert view.selected_text() == "First paragraph\n\ncode here\n\nLast paragraph"
    drag(last, QPoint(last.width() - 1, last.height() - 2), code.viewport(), QPoint(0, 2))
    assert view.selected_text() == "code here\n\nLast paragraph"
    click(code, QPoint(3, 3))
    assert view.selected_text() == ""


def test_the_menu_offers_copying(make_view: ViewMaker) -> None:
    view = make_view("Some *text*")
    menu = view.build_menu("https://example.org")
    actions = {action.text(): action for action in menu.actions() if action.text()}
    assert list(actions) == [
        "Copy",
        "Copy link",
        "Select all",
        "Copy answer as plain text",
        "Copy answer as Markdown",
    ]
    assert not actions["Copy"].isEnabled()
    actions["Copy answer as plain text"].trigger()
    assert QGuiApplication.clipboard().text() == "Some text"
    actions["Copy answer as Markdown"].trigger()
    assert QGuiApplication.clipboard().text() == "Some *text*"
    actions["Copy link"].trigger()
    assert QGuiApplication.clipboard().text() == "https://example.org"
    assert "Copy link" not in [action.text() for action in view.build_menu("").actions()]


# Look and place


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


def test_themes_and_fonts_change_everything_at_once(make_view: ViewMaker) -> None:
    view = make_view(EVERYTHING)
    light = look(view)
    view.apply_theme(DARK)
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
    view.apply_theme(LIGHT)
    view.flush()
    assert [kind for kind, _, _ in look(view)] == [kind for kind, _, _ in light]


def shows_cursor(view: MarkdownView) -> list[bool]:
    return [browser.has_stream_cursor for browser in view.column.browsers()]


def test_a_cursor_stands_at_the_end_while_streaming(make_view: ViewMaker) -> None:
    view = make_view()
    view.append_markdown("One\n\n```\ncode")
    view.flush()
    assert shows_cursor(view) == [False, True]
    view.append_markdown("\n```\n\nTwo")
    view.flush()
    assert shows_cursor(view) == [False, False, True]
    view.finish()
    view.flush()
    assert shows_cursor(view) == [False, False, False]


def test_the_cursor_is_inside_the_pane(make_view: ViewMaker) -> None:
    view = make_view()
    view.show()
    for _ in range(60):
        view.append_markdown("word ")
        view.flush()
        pane = view.column.browsers()[0]
        assert pane.viewport().rect().contains(pane.stream_cursor_rect().toRect())


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


def test_long_work_is_done_in_slices(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view()
    view.set_markdown("A paragraph with *some* words.\n\n---\n\n" * 600)
    view._update()
    assert 0 < len(view.column.shown) < 1_200
    qtbot.waitUntil(lambda: len(view.column.shown) == 1_200, timeout=60_000)
