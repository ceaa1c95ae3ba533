"""The chat page as a person uses it: a real store, a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.models.conversation_defaults import Preset
from app.services.chat_store import ChatStore, Conversation, Message, MessageState
from app.services.engine_client import EngineState
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.chat.answer_message import AnswerMessage
from app.views.chat.chat_view import ChatView
from app.views.chat.close_guard import CloseGuard
from app.views.chat.user_message import UserMessage
from engine.errors import ErrorCode
from tests.app.scripted_engine import STARTER, ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def store(qtbot: QtBot) -> Iterator[ChatStore]:
    store = ChatStore()
    yield store
    store.close()


@pytest.fixture
def open_page(qtbot: QtBot, engine: ScriptedEngine, store: ChatStore) -> Callable[[], ChatView]:
    def build() -> ChatView:
        theme = ThemeController("light")
        page = ChatView(engine, store, theme, Settings())  # type: ignore[arg-type]
        theme.setParent(page)
        qtbot.addWidget(page, before_close_func=lambda page: page.close_down())
        page.resize(1072, 800)
        with qtbot.waitSignal(store.listed):
            page.show()
        return page

    return build


@pytest.fixture
def page(open_page: Callable[[], ChatView]) -> ChatView:
    return open_page()


def type_and_send(qtbot: QtBot, page: ChatView, text: str) -> None:
    page.composer.box.setPlainText(text)
    qtbot.keyClick(page.composer.box, Qt.Key.Key_Return)


def answered(qtbot: QtBot, page: ChatView, engine: ScriptedEngine, question: str, answer: str) -> None:
    type_and_send(qtbot, page, question)
    engine.write(answer)
    engine.finish()


def shown(page: ChatView) -> list[tuple[str, str]]:
    return [(row.message.role, row.message.content) for row in page.presenter.model.rows]


def last_answer(page: ChatView) -> AnswerMessage:
    turn = page.transcript.turns[-1]
    assert isinstance(turn, AnswerMessage)
    return turn


def titles(page: ChatView) -> list[str]:
    return [entry.conversation.title for entry in page.panel._model.entries if entry.conversation is not None]


def test_a_question_and_its_answer(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    assert "Starter" in page.empty.hint
    type_and_send(qtbot, page, "What is the capital of France?")
    assert page.composer.text == ""
    assert page.title_bar.title == "What is the capital of France?"
    assert [message.content for message in engine.requests[0][1]] == ["What is the capital of France?"]
    assert engine.requests[0][2] == Preset.BALANCED.value
    engine.read(41, 100)
    assert last_answer(page).figures == "reading the prompt 41%"
    engine.write("It is ", "**Paris**.")
    qtbot.waitUntil(lambda: last_answer(page).body.markdown() == "It is **Paris**.")
    assert last_answer(page).figures.startswith("writing")
    assert page.composer.send_button.text().startswith("Stop")
    engine.finish(prompt_tokens=1202)
    assert last_answer(page).figures == "24.6 tokens/s  ·  first token 0.80 s  ·  2 tokens"
    assert page.composer.meter.text() == "context 1,204 of 8,192"
    assert page.composer.send_button.text() == "Send"


def test_shift_enter_starts_a_line_and_an_empty_box_sends_nothing(page: ChatView, qtbot: QtBot) -> None:
    qtbot.keyClick(page.composer.box, Qt.Key.Key_Return)
    qtbot.keyClicks(page.composer.box, "a")
    qtbot.keyClick(page.composer.box, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    qtbot.keyClicks(page.composer.box, "b")
    assert page.composer.text == "a\nb"
    assert shown(page) == []


def test_the_box_grows_with_its_text_up_to_a_limit(page: ChatView, qtbot: QtBot) -> None:
    box = page.composer.box
    one = box.height()
    box.setPlainText("a\nb\nc")
    three = box.height()
    box.setPlainText("\n".join("abcdefghijklmnopqrstuvwxyz"))
    assert one < three < box.height() < 400


def test_an_example_is_asked_with_a_click(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    button = page.empty.examples[0]
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    assert engine.requests[0][1][0].content == button.text()


def test_escape_stops_and_keeps_the_text(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    type_and_send(qtbot, page, "Tell me a story")
    engine.write("Once upon")
    page.activateWindow()
    qtbot.keyClick(page, Qt.Key.Key_Escape)
    assert engine.cancelled == [engine.request_id]
    engine.finish("cancelled")
    assert shown(page)[-1] == ("assistant", "Once upon")
    assert "stopped" in last_answer(page).figures
    assert last_answer(page).note == ""


def test_a_message_sent_while_the_model_loads_waits_in_sight(
    open_page: Callable[[], ChatView], engine: ScriptedEngine, qtbot: QtBot
) -> None:
    engine.model, engine.state = None, EngineState.STARTING
    page = open_page()
    engine.start_loading(40, 100)
    assert page.title_bar.model_chip.text == "loading the model 40%"
    assert "40%" in page.empty.hint
    type_and_send(qtbot, page, "Hello?")
    assert last_answer(page).figures == "waiting for the model to load 40%"
    assert engine.requests == []
    engine.end_loading()
    engine.write("Hello!")
    engine.finish()
    assert shown(page)[-1] == ("assistant", "Hello!")
    assert page.title_bar.model_chip.text == "Starter · bf16"
    assert page.title_bar.device_chip.text == "CPU · 2 threads"


def test_a_device_that_was_not_asked_for_is_told(open_page: Callable[[], ChatView], engine: ScriptedEngine) -> None:
    engine.model = replace(STARTER, device_note="CUDA was asked for, but there is no driver")
    page = open_page()
    assert "no driver" in page.title_bar.device_chip.text
    assert page.title_bar.device_chip.toolTip() == engine.model.device_note


def test_regenerating_makes_a_version_to_leaf_through(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "q", "first")
    last_answer(page).acted.emit("regenerate")
    assert [m.content for m in engine.requests[1][1]] == ["q"]
    engine.write("second")
    engine.finish()
    assert shown(page) == [("user", "q"), ("assistant", "second")]
    assert last_answer(page)._versions.text == "2 of 2"
    last_answer(page).version_stepped.emit(-1)
    assert shown(page) == [("user", "q"), ("assistant", "first")]
    assert last_answer(page)._versions.text == "1 of 2"


def test_an_edited_question_becomes_a_branch(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "one", "1")
    answered(qtbot, page, engine, "two", "2")
    first = page.transcript.turns[0]
    assert isinstance(first, UserMessage)
    first.start_editing()
    assert first.editor is not None
    qtbot.keyClick(first.editor, Qt.Key.Key_Escape)
    assert first.editor is None
    first.start_editing()
    first.editor.setPlainText("other")
    qtbot.keyClick(first.editor, Qt.Key.Key_Return)
    engine.write("3")
    engine.finish()
    assert shown(page) == [("user", "other"), ("assistant", "3")]
    page.presenter.step_version(page.presenter.model.rows[0].message.id, -1)
    assert shown(page) == [("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")]


def test_going_on_in_a_new_chat_copies_the_path(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "one", "1")
    answered(qtbot, page, engine, "two", "2")
    page.transcript.turns[1].acted.emit("branch")
    assert shown(page) == [("user", "one"), ("assistant", "1")]
    assert titles(page) == ["one (branch)", "one"]
    answered(qtbot, page, engine, "else", "3")
    assert [m.content for m in engine.requests[-1][1]] == ["one", "1", "else"]


def test_the_engine_dies_is_restarted_and_the_chat_goes_on(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot
) -> None:
    type_and_send(qtbot, page, "Tell me")
    engine.write("The text ", "so far")
    engine.die()
    answer = last_answer(page)
    assert shown(page)[-1] == ("assistant", "The text so far")
    assert "killed" in answer.note
    assert "kept" in answer.note
    assert not answer._restart.isHidden()
    assert answer._note_again.isHidden()
    qtbot.mouseClick(answer._restart, Qt.MouseButton.LeftButton)
    assert engine.restarts == 1
    engine.start_loading()
    engine.end_loading()
    assert answer._restart.isHidden()
    qtbot.mouseClick(answer._note_continue, Qt.MouseButton.LeftButton)
    assert [m.role for m in engine.requests[-1][1]] == ["user", "assistant", "user"]
    engine.write("and the rest")
    engine.finish()
    assert shown(page)[-1] == ("assistant", "and the rest")
    with qtbot.waitSignal(store.loaded) as loaded:
        store.load(page.presenter.conversation.id)
    assert loaded.args[1][1].state is MessageState.PARTIAL


def test_a_message_sent_to_a_dead_engine_waits_for_the_restart(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    engine.die()
    type_and_send(qtbot, page, "Are you there?")
    assert "restarted" in last_answer(page).note
    engine.restart()
    engine.start_loading()
    engine.end_loading()
    engine.write("Yes")
    engine.finish()
    assert shown(page)[-1] == ("assistant", "Yes")
    assert last_answer(page).note == ""


def test_an_engine_that_died_before_any_model_loads_the_default_one(
    open_page: Callable[[], ChatView], engine: ScriptedEngine, qtbot: QtBot
) -> None:
    engine.model, engine.state, engine.knows_a_model = None, EngineState.STARTING, False
    page = open_page()
    engine.die()
    type_and_send(qtbot, page, "Hello?")
    last_answer(page).acted.emit("restart")
    assert [config.model for config in engine.loads] == ["starter"]


def test_a_prompt_that_is_too_long_is_told_calmly_and_kept(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    type_and_send(qtbot, page, "long " * 100)
    engine.fail(ErrorCode.PROMPT_TOO_LONG, "The prompt has 9,120 tokens, but the model reads at most 8,192.")
    assert "9,120" in last_answer(page).note
    assert "edit it" in last_answer(page).note
    assert shown(page)[0] == ("user", "long " * 100)


def test_an_answer_goes_on_while_another_chat_is_shown(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    type_and_send(qtbot, page, "first chat")
    first = page.presenter.conversation.id
    engine.write("one ")
    page.new_chat()
    assert shown(page) == []
    type_and_send(qtbot, page, "second chat")
    assert last_answer(page).figures == "waiting for another answer to end"
    engine.write("two")
    page.presenter.open(first)
    qtbot.waitUntil(lambda: last_answer(page).body.markdown() == "one two")
    engine.finish()
    assert shown(page)[-1] == ("assistant", "one two")
    assert len(engine.requests) == 2
    engine.write("other")
    engine.finish()
    page.presenter.step(-1)
    assert shown(page) == [("user", "second chat"), ("assistant", "other")]


def test_everything_is_there_after_a_restart(
    open_page: Callable[[], ChatView], engine: ScriptedEngine, store: ChatStore, qtbot: QtBot
) -> None:
    page = open_page()
    answered(qtbot, page, engine, "q", "first")
    last_answer(page).acted.emit("regenerate")
    engine.write("second")
    engine.finish()
    page.presenter.set_system_prompt("be brief")
    page.presenter.set_sampling(Preset.CREATIVE.value)
    page.composer.box.setPlainText("a draft")
    page.close_down()
    page._theme.setParent(None)
    Settings.save(page.presenter._settings)
    again = open_page()
    qtbot.waitUntil(lambda: shown(again) == [("user", "q"), ("assistant", "second")])
    assert again.composer.text == "a draft"
    assert again.composer.sampling_button.text() == "Creative"
    assert again.presenter.conversation.system_prompt == "be brief"
    again.transcript.build_all()
    assert last_answer(again)._versions.text == "2 of 2"
    again._theme.setParent(again)


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
    page.presenter.undo_delete()
    assert page.presenter.model.rows[-1].message.state is MessageState.PARTIAL


def test_renaming_in_the_list(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "old name", "yes")
    page.rename()
    editor = QApplication.focusWidget()
    assert editor is not None
    editor.setText("  new   name ")  # type: ignore[attr-defined]
    qtbot.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: titles(page) == ["new name"])
    assert page.title_bar.title == "new name"


def test_pinning_moves_a_chat_to_the_top(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "a", "1")
    first = page.presenter.conversation
    page.new_chat()
    answered(qtbot, page, engine, "b", "2")
    menu = page.panel.menu_for(first)
    next(action for action in menu.actions() if "Pin" in action.text()).trigger()
    assert titles(page) == ["a", "b"]
    menu.deleteLater()


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


def test_sampling_and_system_prompt_belong_to_the_chat(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    page.composer.edit_sampling()
    card = page.composer.sampling_popover
    card.presets[Preset.PRECISE].click()
    assert page.composer.sampling_button.text() == "Precise"
    card.temperature.setValue(1.25)
    card.stop.setText(r"END, \n\n")
    card.stop.textEdited.emit("")
    card.seed.setText("7")
    card.seed.textEdited.emit("")
    assert page.composer.sampling_button.text() == "Custom"
    qtbot.keyClick(card.temperature, Qt.Key.Key_Escape)
    assert card.isHidden()
    page.composer.edit_system_prompt()
    page.composer.system_popover.text.setPlainText("You are brief.")
    qtbot.mouseClick(page.transcript, Qt.MouseButton.LeftButton)
    assert page.composer.system_popover.isHidden()
    type_and_send(qtbot, page, "q")
    _, messages, sampling = engine.requests[0]
    assert (messages[0].role, messages[0].content) == ("system", "You are brief.")
    assert (sampling.temperature, sampling.stop, sampling.seed) == (1.25, ("END", "\n\n"), 7)
    engine.finish()
    page.new_chat()
    assert page.composer.sampling_button.text() == "Balanced"


def test_copying_gives_the_text(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "my question", "an **answer**")
    last_answer(page)._copy.click()
    assert QGuiApplication.clipboard().text().strip() == "an **answer**"
    first = page.transcript.turns[0]
    assert isinstance(first, UserMessage)
    first._buttons[0].click()
    assert QGuiApplication.clipboard().text() == "my question"


def test_exporting_and_importing(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot, tmp_path: Path
) -> None:
    answered(qtbot, page, engine, "q", "a")
    file = tmp_path / "chat.json"
    with qtbot.waitSignal(store.exported):
        page.presenter.export_chats([page.presenter.conversation.id], file)
    assert str(file) in page.toast.text
    assert json.loads(file.read_text(encoding="utf-8"))["conversations"][0]["title"] == "q"
    with qtbot.waitSignal(store.imported):
        page.presenter.import_chats(file)
    qtbot.waitUntil(lambda: len(titles(page)) == 2)
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    with qtbot.waitSignal(store.failed):
        page.presenter.import_chats(tmp_path / "bad.json")
    assert "bad.json was not imported" in page.notice_banner.text


def test_a_store_in_trouble_is_told_and_taken_back(page: ChatView, store: ChatStore) -> None:
    store.trouble.emit("The disk is full.")
    assert page.trouble_banner.isVisible()
    store.trouble.emit("")
    assert not page.trouble_banner.isVisible()


def test_closing_with_unsaved_text_is_asked_about(
    page: ChatView, store: ChatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    answers = [False, True]

    def ask(_: CloseGuard) -> bool:
        asked.append(True)
        return answers[len(asked) - 1]

    monkeypatch.setattr(CloseGuard, "ask", ask)
    monkeypatch.setattr(ChatStore, "unsaved", 3)
    store.trouble.emit("The disk is full.")
    assert not page.close()
    assert page.close()
    assert len(asked) == 2


def test_the_view_stays_at_the_end_only_if_the_reader_is_there(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    type_and_send(qtbot, page, "count")
    engine.write("line\n\n" * 100)
    bar = page.transcript.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 500 and bar.value() == bar.maximum())
    bar.setValue(100)
    assert page.transcript._jump.isVisible()
    most = bar.maximum()
    engine.write("line\n\n" * 50)
    qtbot.waitUntil(lambda: bar.maximum() > most)
    assert bar.value() == 100
    qtbot.mouseClick(page.transcript._jump, Qt.MouseButton.LeftButton)
    assert bar.value() == bar.maximum()
    assert not page.transcript._jump.isVisible()
    engine.finish()


def test_a_long_conversation_is_built_a_little_at_a_time(page: ChatView, store: ChatStore, qtbot: QtBot) -> None:
    messages = [
        Message(str(n), "long", str(n - 1) if n else None, "assistant" if n % 2 else "user", f"turn {n}")
        for n in range(300)
    ]
    store.create(Conversation("long", "Long", created_at=1.0, updated_at=1.0), messages)
    page.presenter.open("long")
    qtbot.waitUntil(lambda: len(page.presenter.model.rows) == 300)
    assert len(page.transcript.turns) < 300
    qtbot.waitUntil(lambda: len(page.transcript.turns) == 300, timeout=20_000)
    assert [turn.message_id for turn in page.transcript.turns] == [message.id for message in messages]


def test_tokens_are_gathered_and_not_drawn_one_by_one(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    type_and_send(qtbot, page, "write a lot")
    answer = last_answer(page)
    appended: list[str] = []
    original = answer.append
    answer.append = lambda text: (appended.append(text), original(text))  # type: ignore[method-assign]
    sent = 0

    def some() -> None:
        nonlocal sent
        engine.write(*["word "] * 8)
        sent += 8

    feeder = QTimer(interval=4)
    feeder.timeout.connect(some)
    feeder.start()
    qtbot.waitUntil(lambda: sent >= 512, timeout=20_000)
    feeder.stop()
    engine.finish()
    assert "".join(appended) == "word " * sent
    assert len(appended) < sent / 4


def test_colours_follow_the_theme(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "q", "a")
    before = page.styleSheet()
    page._theme.set_choice("dark")
    assert page.styleSheet() != before
    page._theme.set_font_px(20)
    assert page.transcript.turns[-1].maximumWidth() > 680


def test_everything_has_a_name_for_those_who_cannot_see_it(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    answered(qtbot, page, engine, "q", "a")
    from PySide6.QtWidgets import QAbstractButton, QLineEdit, QPlainTextEdit

    for kind in (QAbstractButton, QLineEdit, QPlainTextEdit):
        for widget in page.findChildren(kind):
            if widget.isVisible() and widget.focusPolicy() != Qt.FocusPolicy.NoFocus:
                assert widget.accessibleName() or getattr(widget, "text", str)(), widget


def test_links_open_only_if_they_are_of_the_web(page: ChatView, monkeypatch: pytest.MonkeyPatch) -> None:
    from PySide6.QtCore import QUrl
    from PySide6.QtGui import QDesktopServices

    opened: list[str] = []
    monkeypatch.setattr(QDesktopServices, "openUrl", lambda url: opened.append(url.toString()))
    for url in ("https://example.org/", "file:///etc/passwd", "javascript:alert(1)"):
        page.transcript.link_activated.emit(QUrl(url))
    assert opened == ["https://example.org/"]
