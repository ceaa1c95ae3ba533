"""The focus stays where people left it when a button that they pressed cannot be used for a while."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, QSize, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLineEdit, QPushButton, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.services.settings import Settings
from app.theme import ThemeController
from app.widgets.page import Page
from tests.app.stage import SCENES, staged


@pytest.fixture
def row(qtbot: QtBot) -> tuple[Page, list[QPushButton]]:
    """Three buttons in a card on a page."""
    page = Page()
    qtbot.addWidget(page)
    card = QWidget(page)
    column = QVBoxLayout(card)
    buttons = [QPushButton(str(number), card) for number in range(3)]
    for button in buttons:
        column.addWidget(button)
    QVBoxLayout(page).addWidget(card)
    with qtbot.waitExposed(page):
        page.show()
    page.activateWindow()
    return page, buttons


@pytest.mark.parametrize("how", ["setEnabled", "setVisible"])
def test_the_next_press_is_not_the_neighbours(row: tuple[Page, list[QPushButton]], how: str) -> None:
    _page, (first, second, third) = row
    pressed: list[str] = []
    for button in (first, second, third):
        button.clicked.connect(lambda _on, button=button: pressed.append(button.text()))
    second.clicked.connect(lambda: getattr(second, how)(False))
    second.setFocus()
    for _ in range(2):
        QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Space)
        QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Return)
    assert pressed == ["1"]
    getattr(second, how)(True)
    assert second.hasFocus()  # again
    getattr(second, how)(False)
    QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Tab)
    assert third.hasFocus()
    getattr(second, how)(True)
    assert third.hasFocus()  # people have gone on
    second.setFocus()
    getattr(second, how)(False)
    QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Backtab)
    assert first.hasFocus()


def test_code_that_says_where_the_focus_goes_is_heard(row: tuple[Page, list[QPushButton]]) -> None:
    _page, (first, second, third) = row
    second.setFocus()
    second.hide()
    third.setFocus()
    assert third.hasFocus()
    second.show()
    assert third.hasFocus()
    third.setFocus()
    first.setFocus()
    third.deleteLater()
    assert first.hasFocus()


def test_tab_reaches_all_of_the_chat_page(settings: Settings, theme: ThemeController, tmp_path: Path) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(1280, 800))
        SCENES["chat-conversation"](stage)
        stage.window.activateWindow()
        chat = stage.chat
        wanted: list[QWidget] = [
            chat.title_bar.model_button,
            chat.title_bar.new_button,
            chat.panel.search,
            chat.panel.list,
            chat.transcript,
            chat.composer.box,
        ]
        stage.window.setFocus()
        chat.setFocus()
        assert chat.composer.box.hasFocus()  # where one writes
        for key in (Qt.Key.Key_Tab, Qt.Key.Key_Backtab):
            reached: list[QWidget] = []
            for _ in range(40):
                QTest.keyClick(QApplication.focusWidget(), key)
                reached.append(QApplication.focusWidget())
            assert [one for one in wanted if one not in reached] == []
            assert not [one for one in reached if isinstance(one, QLineEdit) and one is not chat.panel.search]


def test_pause_and_open_result_stay_in_their_places(settings: Settings, theme: ThemeController, tmp_path: Path) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(1280, 800))
        stage.start_job()
        head = stage.batch.head
        places = []
        for end in (lambda: None, head.pause.click, lambda: stage.engine.end(40, 1)):
            end()
            stage.settle()
            first = head.pause if head.pause.isVisible() else head.resume
            assert first.isVisible()
            assert head.open.isVisible()
            places.append([(each.mapTo(head, QPoint()), each.size()) for each in (first, head.open, head.menu)])
        assert places[0] == places[1] == places[2]
        assert head.open.isEnabled()
        assert not head.pause.isEnabled()
