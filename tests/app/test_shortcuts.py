"""Keys of the whole window, and where the keyboard goes."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QLabel, QPlainTextEdit
from pytestqt.qtbot import QtBot

from app.services.settings import Settings
from app.theme import ThemeController
from app.views.chat.user_message import UserMessage
from app.views.main_window.window import ShortcutsDialog
from app.widgets.page import MONITOR
from app.widgets.timeline.navigator import timeline_keys
from tests.app.stage import staged


def test_keys_and_focus(settings: Settings, theme: ThemeController, tmp_path: Path, qtbot: QtBot) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(900, 600))
        window, box = stage.window, stage.chat.composer.box
        window.activateWindow()
        qtbot.waitUntil(box.hasFocus)
        stage.chat.empty.examples[0].click()
        assert stage.engine.requests
        assert box.hasFocus()
        qtbot.keyClick(box, Qt.Key.Key_F1)
        dialog = window.findChild(ShortcutsDialog)
        assert dialog is not None
        assert "Ctrl+Q" in [label.text() for label in dialog.findChildren(QLabel)]
        dialog.close()
        with qtbot.waitSignal(window.closing):  # though the answer is still being written
            qtbot.keyClick(box, Qt.Key.Key_Q, Qt.KeyboardModifier.ControlModifier)
        assert not window.isVisible()


def test_after_an_edited_message_is_sent_again_one_goes_on_writing(
    settings: Settings, theme: ThemeController, tmp_path: Path, qtbot: QtBot
) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(900, 600))
        stage.window.activateWindow()
        stage.open_conversation()
        first = stage.chat.transcript.turns[0]
        assert isinstance(first, UserMessage)
        first.start_editing()
        editor = first.findChild(QPlainTextEdit)
        assert editor is not None
        qtbot.waitUntil(editor.hasFocus)
        editor.setPlainText("Another question")
        qtbot.keyClick(editor, Qt.Key.Key_Return)
        assert stage.engine.requests
        qtbot.waitUntil(stage.chat.composer.box.hasFocus)


def test_the_list_has_the_keys_of_the_timeline(
    settings: Settings, theme: ThemeController, tmp_path: Path, qtbot: QtBot
) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(900, 600))
        stage.window.show_page(MONITOR)
        stage.window.show_shortcuts()
        dialog = stage.window.findChild(ShortcutsDialog)
        assert dialog is not None
        said = [label.text() for label in dialog.findChildren(QLabel)]
        for pressed, words in timeline_keys():
            assert said.count(words) == 1
            assert pressed in said
        dialog.close()
