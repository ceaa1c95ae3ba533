"""The engine loads, dies, is shared with a job; the store cannot write: nothing that was said is lost."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.services.chat_store import ChatStore, MessageState
from app.services.engine_client import EngineState
from app.services.settings import Settings
from app.views.chat.chat_view import ChatView, UnsavedTextGuard
from app.widgets.page import BATCH
from engine.common.config import BatchJob, EngineConfig
from engine.common.errors import ErrorCode
from engine.common.paths import models_dir
from tests.app.chat.chat_page import last_answer, shown, type_and_send
from tests.app.scripted_batches import ScriptedBatches
from tests.app.scripted_engine import STARTER, ScriptedEngine


def test_a_message_sent_while_the_model_loads_waits_in_sight(
    open_page: Callable[[], ChatView], engine: ScriptedEngine, qtbot: QtBot
) -> None:
    engine.model, engine.state = None, EngineState.STARTING
    page = open_page()
    engine.start_loading(0.4)
    assert page.title_bar.model_button.words == "loading the model 40%"
    for path, name in (("/m/Granite-Q4_K_M.gguf", "Granite-Q4_K_M"), ("/c/snapshots/" + "0a" * 20, "the model")):
        engine.config = EngineConfig(path)
        engine.loading_changed.emit()
        assert page.title_bar.model_button.words == f"loading {name} 40%"
    assert "40%" in page.empty.hint
    type_and_send(qtbot, page, "Hello?")
    assert last_answer(page).figures == "waiting for the model to load 40%"
    assert engine.requests == []
    engine.end_loading()
    engine.reply("Hello!")
    assert shown(page)[-1] == ("assistant", "Hello!")
    assert page.title_bar.model_button.words == "Starter · bf16 · 24.6 tokens/s"
    assert page.title_bar.device_chip.text == "CPU · 2 threads"


def test_a_device_that_was_not_asked_for_is_told(open_page: Callable[[], ChatView], engine: ScriptedEngine) -> None:
    engine.model = replace(STARTER, device_note="CUDA was asked for, but there is no driver", is_hampered=True)
    page = open_page()
    chip = page.title_bar.device_chip
    assert "no driver" in chip.text
    assert chip.toolTip() == engine.model.device_note
    # What is usual is no warning: it can be read up.
    engine.model = replace(STARTER, device_note="There is room for a context of 8,192 tokens, not 131,072.")
    engine.model_loaded.emit(engine.model)
    assert chip.text == "CPU · 2 threads"
    assert chip.toolTip() == engine.model.device_note


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
    qtbot.waitUntil(lambda: answer.height() >= answer.heightForWidth(answer.width()))
    qtbot.mouseClick(answer._restart, Qt.MouseButton.LeftButton)
    assert engine.restarts == 1
    engine.start_loading()
    engine.end_loading()
    assert answer._restart.isHidden()
    qtbot.mouseClick(answer._note_continue, Qt.MouseButton.LeftButton)
    assert [m.role for m in engine.requests[-1].command.messages] == ["user", "assistant", "user"]
    engine.reply("and the rest")
    assert shown(page)[-1] == ("assistant", "and the rest")
    with qtbot.waitSignal(store.loaded) as loaded:
        store.load(page.presenter.conversation.id)
    assert loaded.args[1][1].state is MessageState.PARTIAL


def test_a_message_sent_to_a_dead_engine_waits_for_the_restart(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    engine.die()
    type_and_send(qtbot, page, "Are you there?")
    assert "not running" in last_answer(page).note
    engine.restart()
    engine.start_loading()
    engine.end_loading()
    engine.reply("Yes")
    assert shown(page)[-1] == ("assistant", "Yes")
    assert last_answer(page).note == ""


def test_a_restart_from_the_chat_loads_the_default_model_as_the_settings_say(
    open_page: Callable[[], ChatView], engine: ScriptedEngine, qtbot: QtBot
) -> None:
    model = models_dir() / "mine"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    settings = Settings()
    for key, value in (("default_model", "mine"), ("device", "cpu"), ("threads", 3)):
        settings.set(key, value)
    settings.save()
    engine.model, engine.state, engine.knows_a_model = None, EngineState.STARTING, False
    page = open_page()
    engine.die()
    type_and_send(qtbot, page, "Hello?")
    last_answer(page).acted.emit("restart")
    qtbot.waitUntil(lambda: bool(engine.loads))
    assert [load.command.config for load in engine.loads] == [EngineConfig(model=str(model), device="cpu", threads=3)]


def test_a_store_in_trouble_is_told_and_closing_with_unsaved_text_asked_about(
    page: ChatView, store: ChatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.trouble.emit("The disk is full.")
    assert page.trouble_banner.isVisible()
    store.trouble.emit("")
    assert not page.trouble_banner.isVisible()
    asked: list[bool] = []
    answers = [False, True]

    def ask(_: UnsavedTextGuard) -> bool:
        asked.append(True)
        return answers[len(asked) - 1]

    monkeypatch.setattr(UnsavedTextGuard, "ask", ask)
    monkeypatch.setattr(ChatStore, "unsaved", 3)
    store.trouble.emit("The disk is full.")
    assert not page.close()
    assert page.close()
    assert len(asked) == 2


@pytest.fixture
def engine() -> ScriptedBatches:
    return ScriptedBatches()


def test_a_job_is_told_and_shares(open_page: Callable[[], ChatView], engine: ScriptedBatches, qtbot: QtBot) -> None:
    page = open_page()
    hint = page.batch_hint
    assert not hint.isVisible()
    engine.start_batch(BatchJob("in.csv", "out.csv"))
    engine.tell(30, 120)
    assert hint.isVisible()
    assert "running" in hint.text
    assert "25%" in hint.text
    type_and_send(qtbot, page, "Hello?")
    assert "shares the engine with your chat" in hint.text
    assert "25%" in hint.text
    engine.reply("Hello!")
    assert "is running" in hint.text
    with qtbot.waitSignal(page.page_wanted) as wanted:
        qtbot.mouseClick(hint.button, Qt.MouseButton.LeftButton)
    assert wanted.args == [BATCH]
    engine.end(120)
    assert not hint.isVisible()


def test_a_job_that_fails_is_no_longer_told(open_page: Callable[[], ChatView], engine: ScriptedBatches) -> None:
    page = open_page()
    engine.start_batch(BatchJob("in.csv", "out.csv"))
    engine.tell(0)
    assert page.batch_hint.text.startswith("A batch job is running. ")
    engine.fail_job(ErrorCode.INVALID_REQUEST, "The input was changed.")
    assert not page.batch_hint.isVisible()


def test_a_job_that_stays_paused_after_the_engine_died_says_so_until_it_goes_on(
    open_page: Callable[[], ChatView], engine: ScriptedBatches, qtbot: QtBot
) -> None:
    hint = open_page().batch_hint
    for see in (lambda: engine.tell(5), lambda: qtbot.mouseClick(hint.button, Qt.MouseButton.LeftButton)):
        engine.start_batch(BatchJob("in.csv", "out.csv"))
        engine.tell(4)
        engine.fail_job(ErrorCode.ENGINE_DIED, "The engine was killed.")
        engine.restart()
        assert hint.isVisible()
        assert "engine stopped" in hint.text
        see()
        assert "engine stopped" not in hint.text or not hint.isVisible()
