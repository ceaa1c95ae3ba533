"""Links are announced, nothing is loaded, and text is selected over all panes."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import QColor, QGuiApplication, QImage, QMouseEvent, QTextDocument
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.widgets.markdown_view.document_pane import DocumentPane
from tests.app.markdown.markdown_looks import ViewMaker


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
