"""Many chats: kept, found, renamed, pinned, deleted and brought back, exported and imported."""

import json
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.chat_store import ChatStore, MessageState
from app.services.kept import Preset
from app.services.settings import Settings
from app.views.chat.chat_view import ChatView
from tests.app.chat.chat_page import answered, last_answer, shown, titles, type_and_send
from tests.app.scripted_engine import ScriptedEngine
from tests.unit.test_chats_of_other_programs import conversation


def test_everything_is_there_after_a_restart(
    open_page: Callable[[], ChatView], engine: ScriptedEngine, store: ChatStore, qtbot: QtBot
) -> None:
    page = open_page()
    answered(qtbot, page, engine, "q", "first")
    last_answer(page).acted.emit("regenerate")
    engine.reply("second")
    page.presenter.set_system_prompt("be brief")
    page.presenter.set_sampling(Preset.CREATIVE.value)
    page.composer.box.setPlainText("a draft")
    page.close_down()
    Settings.save(page.presenter._settings)
    again = open_page()
    qtbot.waitUntil(lambda: shown(again) == [("user", "q"), ("assistant", "second")])
    assert again.composer.text == "a draft"
    assert again.composer.sampling_button.text() == "Creative"
    assert again.presenter.conversation.system_prompt == "be brief"
    again.transcript.build_all()
    assert last_answer(again)._versions.text == "2 of 2"


def test_each_chat_keeps_its_own_draft(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "one", "1")
    first = page.presenter.conversation.id
    page.composer.box.setPlainText("draft of the first")
    page.new_chat()
    assert page.composer.text == ""
    page.presenter.open(first)
    assert page.composer.text == "draft of the first"


def test_deleting_can_be_undone_with_the_keyboard(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "keep me", "yes")
    page.panel.list.setFocus()
    page.panel.set_current(page.presenter.conversation.id)
    qtbot.keyClick(page.panel.list, Qt.Key.Key_Delete)
    assert titles(page) == []
    assert shown(page) == []
    assert "keep me" in page.toast.text
    page.composer.box.setFocus()
    qtbot.keyClick(page.composer.box, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert titles(page) == ["keep me"]
    assert shown(page) == [("user", "keep me"), ("assistant", "yes")]


def test_deleting_a_chat_ends_its_answer(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    type_and_send(qtbot, page, "going")
    page.presenter.delete(page.presenter.conversation.id)
    assert engine.cancelled == [engine.request_id]
    engine.finish("cancelled")
    page.presenter.undo()
    assert page.presenter.model.rows[-1].message.state is MessageState.PARTIAL


def test_pinning_moves_a_chat_to_the_top_and_it_is_renamed_in_the_list(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    answered(qtbot, page, engine, "a", "1")
    first = page.presenter.conversation
    page.new_chat()
    answered(qtbot, page, engine, "b", "2")
    menu = page.panel.menu_for(first)
    next(action for action in menu.actions() if "Pin" in action.text()).trigger()
    assert titles(page) == ["a", "b"]
    menu.deleteLater()
    page.rename()
    editor = QApplication.focusWidget()
    editor.setText("  new   name ")  # type: ignore[attr-defined]
    qtbot.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: titles(page) == ["a", "new name"])
    assert page.title_bar.title == "new name"


def test_searching_finds_an_answer_and_shows_it(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot
) -> None:
    answered(qtbot, page, engine, "animals", "the walrus swims")
    page.new_chat()
    answered(qtbot, page, engine, "plants", "the oak stands")
    with qtbot.waitSignal(store.found):
        page.panel.search.setText("walr")
    assert titles(page) == ["animals"]
    qtbot.keyClick(page.panel.search, Qt.Key.Key_Return)
    assert shown(page)[-1] == ("assistant", "the walrus swims")
    with qtbot.waitSignal(store.found):
        page.panel.search.setText("nowhere")
    assert not page.panel.nothing.isHidden()
    qtbot.keyClick(page.panel.search, Qt.Key.Key_Escape)
    qtbot.waitUntil(lambda: titles(page) == ["plants", "animals"])
    assert page.panel.nothing.isHidden()


def test_exporting_and_importing(page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path) -> None:
    answered(qtbot, page, engine, "q", "a")
    chat, files = page.presenter.conversation.id, page.transfer.files
    for suffix in ("json", "md", "html", "pdf", "zip"):
        with qtbot.waitSignal(files.exported):
            page.transfer.export([chat], tmp_path / f"chat.{suffix}")
        assert f"chat.{suffix}" in page.toast.text
    assert json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))["conversations"][0]["title"] == "q"
    assert (tmp_path / "chat.pdf").read_bytes().startswith(b"%PDF")
    for suffix in ("json", "zip"):
        with qtbot.waitSignal(files.imported):
            page.transfer.import_files([tmp_path / f"chat.{suffix}"])
        assert "1 was already here" in page.toast.text
        assert page.transfer.banner.isHidden()
    assert titles(page) == ["q"]
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with qtbot.waitSignal(files.imported):
        page.transfer.import_files([tmp_path / "bad.json"])
    assert "bad.json was not imported" in page.transfer.banner.text
    page.transfer.export([chat], tmp_path / "bad.json" / "below.pdf")
    qtbot.waitUntil(lambda: "could not be written" in page.transfer.banner.text)


def test_what_chatgpt_said_is_found_after_an_import(
    page: ChatView, store: ChatStore, qtbot: QtBot, tmp_path: Path
) -> None:
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([conversation(n) for n in range(3)]), encoding="utf-8")
    page.composer.box.setPlainText("being written")
    with qtbot.waitSignal(page.transfer.files.imported):
        page.transfer.import_files([file])
    assert "Imported: 3 chats. Left out: tool calls (6)." in page.transfer.banner.text
    assert page.composer.text == "being written"  # many chats take nobody away from what they do
    assert len(titles(page)) == 3
    with qtbot.waitSignal(store.found):
        page.panel.search.setText("three")
    assert len(titles(page)) == 3
    qtbot.keyClick(page.panel.search, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: shown(page)[-1:] == [("assistant", "Three.")])  # the version that is not the chosen one
