"""Links are announced, nothing is loaded, and text is selected and copied as it reads."""

import pytest
from PySide6.QtCore import QEvent, QPoint, QPointF, QRect, Qt, QUrl
from PySide6.QtGui import QColor, QGuiApplication, QImage, QMouseEvent, QTextCursor, QTextDocument
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.widgets.answer_text import AnswerView
from tests.app.answer_text.looks import ViewMaker


def place_of(view: AnswerView, text: str) -> QRect:
    """Where this text begins."""
    cursor = view.document().find(text)
    assert not cursor.isNull()
    cursor.setPosition(cursor.selectionStart())
    return view.cursorRect(cursor)


def select(view: AnswerView, first: str, last: str) -> None:
    start, end = view.document().find(first), view.document().find(last)
    cursor = view.textCursor()
    cursor.setPosition(start.selectionStart())
    cursor.setPosition(end.selectionEnd(), QTextCursor.MoveMode.KeepAnchor)
    view.setTextCursor(cursor)


@pytest.mark.parametrize(
    ("text", "label", "address"),
    [
        ("[manual](https://example.org/manual) and text", "manual", "https://example.org/manual"),
        ("see https://example.org/a_b_c(1).", "https", "https://example.org/a_b_c(1)"),
        ("(see http://example.org/x)", "http", "http://example.org/x"),
    ],
)
def test_a_link_is_announced_and_not_opened(
    make_view: ViewMaker, qtbot: QtBot, text: str, label: str, address: str
) -> None:
    view = make_view(text)
    view.show()
    at = place_of(view, label).center() + QPoint(4, 0)
    with qtbot.waitSignal(view.link_activated) as signal:
        qtbot.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=at)
    assert signal.args == [QUrl(address)]
    assert view.source().isEmpty()


def test_links_are_reached_by_the_keyboard(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("Read the [manual](https://example.org/manual).")
    view.show()
    view.setFocus(Qt.FocusReason.TabFocusReason)
    qtbot.keyClick(view, Qt.Key.Key_Tab)
    with qtbot.waitSignal(view.link_activated):
        qtbot.keyClick(view, Qt.Key.Key_Return)


def test_numbers_of_sources_are_links(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("It rains [1], as others say [2, 3]; `a[1]`, [9] and [manual](reference:1).\n\n```\nb[1]\n```")
    view.show()
    view.set_references({1: "weather.pdf, page 3", 2: "b.txt", 3: "c.txt"})
    opened: list[int] = []
    view.reference_activated.connect(opened.append)
    for text, along in (("[1]", 1), ("2, 3", 0), ("3]", 0), ("a[1]", 1), ("[9]", 1), ("manual", 1), ("b[1]", 1)):
        cursor = view.document().find(text)
        cursor.setPosition(cursor.selectionStart() + along)
        at = view.cursorRect(cursor).center() + QPoint(2, 0)
        if view.anchorAt(at):
            qtbot.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=at)
    assert opened == [1, 2, 3]
    view.set_markdown("Again [3].")
    view.flush()
    view.setFocus(Qt.FocusReason.TabFocusReason)
    qtbot.keyClick(view, Qt.Key.Key_Tab)
    with qtbot.waitSignal(view.reference_activated) as signal:
        qtbot.keyClick(view, Qt.Key.Key_Return)
    assert signal.args == [3]


def test_nothing_is_ever_loaded(make_view: ViewMaker, tmp_path: object) -> None:
    picture = QImage(4, 4, QImage.Format.Format_RGB32)
    picture.fill(QColor("red"))
    path = f"{tmp_path}/p.png"
    assert picture.save(path)
    view = make_view(
        f"![a]({path}) ![b](file://{path}) <img src='{path}'> ![c](http://127.0.0.1:9/x.png)\n\n```\nx\n```"
    )
    kinds = QTextDocument.ResourceType
    for kind in (kinds.ImageResource, kinds.HtmlResource, kinds.StyleSheetResource):
        assert view.loadResource(kind.value, QUrl.fromLocalFile(path)) is None
        assert view.document().resource(kind.value, QUrl.fromLocalFile(path)) is None
    assert "<img" not in view.toHtml()
    assert "[image: c]" in view.plain_text()


def test_what_is_selected_is_copied_as_it_reads(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view(
        "A *b*\n\n- c\n- [x] d\n  1. e\n\n```py\nf\n\n  g\n```\n\n> q\n\n|h|i|\n|-|-|\n|j|k|\n\n---\n\nEnd `l`"
    )
    view.show()
    qtbot.keyClick(view, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
    whole = "A b\n\n- c\n- [x] d\n  1. e\n\nf\n\n  g\n\nq\n\nh\ti\nj\tk\n\n---\n\nEnd l"
    assert view.selected_text() == whole
    qtbot.keyClick(view, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QGuiApplication.clipboard().text() == whole
    assert view.createMimeDataFromSelection().text() == whole
    select(view, "d", "g")
    assert view.selected_text() == "d\n  1. e\n\nf\n\n  g"
    assert view.plain_text() == whole


def test_copying_without_a_selection_takes_the_whole_answer(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("A *b*")
    view.show()
    qtbot.keyClick(view, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QGuiApplication.clipboard().text() == "A *b*"


def drag(view: AnswerView, begin: QPoint, end: QPoint) -> None:
    left, none = Qt.MouseButton.LeftButton, Qt.MouseButton.NoButton
    for kind, at, button, buttons in (
        (QEvent.Type.MouseButtonPress, begin, left, left),
        (QEvent.Type.MouseMove, begin + QPoint(30, 0), none, left),
        (QEvent.Type.MouseMove, end, none, left),
        (QEvent.Type.MouseButtonRelease, end, left, none),
    ):
        where = QPointF(view.viewport().mapToGlobal(at))
        event = QMouseEvent(kind, QPointF(at), where, button, buttons, Qt.KeyboardModifier.NoModifier)
        QApplication.sendEvent(view.viewport(), event)


def test_dragging_selects_over_text_code_and_tables(make_view: ViewMaker) -> None:
    view = make_view("First paragraph\n\n```\ncode here\n```\n\n|a|b|\n|-|-|\n|c|d|\n\nLast paragraph")
    view.resize(640, view.heightForWidth(640))
    view.show()
    drag(view, place_of(view, "First").center(), place_of(view, "Last").center() + QPoint(40, 0))
    assert view.selected_text().startswith("First paragraph\n\ncode here\n\na\tb\nc\td\n\nLast")


def test_the_keys_select(make_view: ViewMaker, qtbot: QtBot) -> None:
    view = make_view("Some words\n\nand more")
    view.show()
    view.setFocus()
    shift = Qt.KeyboardModifier.ShiftModifier
    for _ in range(4):
        qtbot.keyClick(view, Qt.Key.Key_Right, shift)
    assert view.selected_text() == "Some"
    qtbot.keyClick(view, Qt.Key.Key_Down, shift)
    assert view.selected_text().startswith("Some words\n\n")


def test_the_menu_offers_copying(make_view: ViewMaker) -> None:
    view = make_view("Some *text*")
    menu = view.build_menu("https://example.org")
    actions = {action.text(): action for action in menu.actions() if action.text()}
    assert list(actions) == [
        "Copy",
        "Copy link",
        "Select all",
        "Copy all as plain text",
        "Copy all as Markdown",
    ]
    assert not actions["Copy"].isEnabled()
    actions["Copy all as plain text"].trigger()
    assert QGuiApplication.clipboard().text() == "Some text"
    actions["Copy all as Markdown"].trigger()
    assert QGuiApplication.clipboard().text() == "Some *text*"
    actions["Copy link"].trigger()
    assert QGuiApplication.clipboard().text() == "https://example.org"
    assert "Copy link" not in [action.text() for action in view.build_menu("").actions()]


def test_matches_are_marked_and_shown(make_view: ViewMaker) -> None:
    view = make_view("🚂 One two\n\n```\nTWO = 2\n```\n\n- and two")
    matches = view.find_matches("two")
    assert len(matches) == 3
    texts = []
    for number, match in enumerate(matches):
        view.show_match(number)
        cursor = view.textCursor()
        cursor.setPosition(match.start)
        cursor.setPosition(match.end, QTextCursor.MoveMode.KeepAnchor)
        texts.append(cursor.selectedText())
    assert texts == ["two", "TWO", "two"]
    assert len(view.extraSelections()) == 3
    assert view.find_matches("") == []
    assert view.extraSelections() == []
    assert view.find_matches("no such thing") == []
