"""Chats that another server answers: it is said where text goes, asked once, and nothing goes there by itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel, QMessageBox, QPushButton
from pytestqt.qtbot import QtBot

from app.models.library import ROW_ROLE
from app.services.chat_store import MessageState
from app.views.chat.answer_message import AnswerMessage
from app.views.chat.chat_view import ChatView
from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.remote.endpoint import Endpoint, Found, endpoint_at, remote_name, remove_endpoint, save_endpoint
from tests.app.scripted_engine import ScriptedEngine

FOUND = Found("vllm", "0.12", ("org/big", "org/small"), (32768, 0), ())
RACK = endpoint_at("http://10.0.0.5:8000/v1", "Rack", found=FOUND)
HERE = endpoint_at("http://127.0.0.1:8080/v1", "Here", model="m", found=Found("llama.cpp", "", ("m",), (4096,)))
BIG = remote_name(RACK, "org/big")


@pytest.fixture
def saved() -> Endpoint:
    save_endpoint(RACK)
    save_endpoint(HERE)
    return RACK


@pytest.fixture
def page(saved: Endpoint, open_page: Callable[[], ChatView]) -> ChatView:
    return open_page()


def write(page: ChatView, text: str = "Hello") -> None:
    page.composer.box.setPlainText(text)
    QTest.keyClick(page.composer.box, Qt.Key.Key_Return)


def answer_question(page: ChatView, button: str) -> None:
    box = page.question
    assert isinstance(box, QMessageBox)
    next(each for each in box.findChildren(QPushButton) if each.text() == button).click()


def test_they_stand_in_the_picker_under_their_own_heading(page: ChatView, qtbot: QtBot) -> None:
    page.choose_model()
    qtbot.waitUntil(lambda: page.picker.rows.rowCount() >= 3)
    rows = [page.picker.rows.index(at, 0).data(ROW_ROLE) for at in range(page.picker.rows.rowCount())]
    there = [row for row in rows if row.remote]
    assert [row.entry.name for row in there] == ["m", "org/big", "org/small"]
    assert [row.heading for row in there] == ["Remote servers", "", ""]
    assert there[1].place == "Sent to Rack (10.0.0.5:8000)"
    page.picker.filter.setText("rack big")
    assert page.picker.rows.rowCount() == 1
    QTest.keyClick(page.picker.filter, Qt.Key.Key_Return)
    assert page.presenter.conversation.model == BIG
    assert page.picker.isHidden()
    assert page.focusWidget() is page.composer.box  # to go on writing
    page.picker.filter.setFocus()
    page.panel.search.setFocus()
    QTest.mouseClick(page.composer, Qt.MouseButton.LeftButton, pos=QPoint(3, 3))
    assert page.focusWidget() is page.composer.box


def test_each_answer_says_who_else_gave_it_and_what_is_about_this_pc_is_hidden(
    page: ChatView, engine: ScriptedEngine
) -> None:
    strips: list[QLabel] = []
    page.add_strip(lambda parent: strips.append(QLabel("about this PC", parent)) or strips[0])
    for model, text in (("", "Hello"), (remote_name(HERE, "m"), "And you?"), ("", "And now?")):
        page.presenter.choose_model(model)
        write(page, text)
        assert strips[0].isVisible() is not bool(model)
        engine.reply("Hi", rate=24.6)
    answers = [turn for turn in page.transcript.turns if isinstance(turn, AnswerMessage)]
    assert [each.figures.split("  ·  ")[0] for each in answers] == ["24.6 tokens/s", "m (Here)", "24.6 tokens/s"]


def test_what_is_written_goes_there_once_people_agree(page: ChatView, engine: ScriptedEngine) -> None:
    page.presenter.choose_model(BIG)
    assert page.sent_note.isVisible()
    assert page.sent_note.text() == "Sent to Rack (10.0.0.5:8000): what you write in this chat leaves this PC."
    assert page.title_bar.model_button.accessibleName().startswith("Model: org/big")
    write(page)
    assert engine.requests == []
    answer_question(page, "Cancel")
    assert engine.requests == []
    assert page.composer.text == "Hello"
    write(page)
    answer_question(page, "Send it there")
    command = engine.requests[0].command
    assert (command.remote.endpoint, command.remote.model) == (RACK, "org/big")
    assert command.remote.chosen == ("max_tokens",)
    assert page.composer.text == ""
    engine.reply("Hi")
    page.question = None
    write(page, "And again")
    assert page.question is None
    assert len(engine.requests) == 2
    assert engine.requests[1].command.remote is not None


def test_settings_of_the_chat_are_sent(page: ChatView, engine: ScriptedEngine) -> None:
    page.presenter.choose_model(remote_name(HERE, "m"))
    page.presenter.set_sampling(SamplingParams(temperature=0.3))
    write(page)  # nobody is asked about a server on this machine
    remote = engine.requests[0].command.remote
    assert remote.chosen is None
    assert engine.requests[0].command.sampling.temperature == 0.3


def test_settings_that_a_server_does_not_take_are_said(page: ChatView, engine: ScriptedEngine) -> None:
    save_endpoint(endpoint_at("http://127.0.0.1:9/v1", "Plain", model="m", found=Found("other", "", ("m",), (0,), ())))
    page._endpoints.look_again()
    page.presenter.choose_model("endpoint:Plain/m")
    assert "does not take" not in page.sent_note.text()
    page.presenter.set_sampling(SamplingParams(temperature=0.3, top_k=4, repetition_penalty=1.1))
    assert page.sent_note.text().endswith("It does not take this chat's top-k, the repetition penalty.")


def test_speeds_and_failures_of_another_server_say_nothing_of_the_model_here(
    page: ChatView, engine: ScriptedEngine
) -> None:
    heard: list[object] = []
    engine.answered.connect(heard.append)
    page.presenter.choose_model(remote_name(HERE, "m"))
    write(page)
    engine.reply("Hi", rate=900.0)
    assert heard == []
    page.presenter.choose_model("")
    assert "900" not in page.title_bar.model_button.accessibleName()
    page.presenter.choose_model(remote_name(HERE, "m"))
    write(page)
    engine.fail(ErrorCode.ENDPOINT_FAILED, "Here gave no answer: check that the server runs.")
    assert len(engine.requests) == 2
    assert page.presenter.model.rows[-1].message.reason.startswith("Here gave no answer")


def test_each_chat_keeps_its_own(page: ChatView, engine: ScriptedEngine) -> None:
    write(page, "Stay here")
    engine.reply("Yes")
    first = page.presenter.conversation.id
    page.new_chat()
    page.presenter.choose_model(remote_name(HERE, "m"))
    write(page, "Go there")
    engine.finish()
    assert engine.requests[1].command.remote is not None
    page.presenter.open(first)
    assert not page.presenter.is_elsewhere
    assert page.sent_note.isHidden()
    write(page, "Still here")
    assert engine.requests[2].command.remote is None
    page.new_chat()
    assert not page.presenter.is_elsewhere


def test_a_chat_from_a_file_goes_nowhere_by_itself(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path
) -> None:
    page.presenter.choose_model(remote_name(HERE, "m"))
    write(page, "Go there")
    engine.finish()
    chat = page.presenter.conversation
    files = page.transfer.files
    with qtbot.waitSignal(files.exported):
        page.transfer.export([chat.id], tmp_path / "chats.json")
    page.presenter.delete(chat.id)
    with qtbot.waitSignal(files.imported):
        page.transfer.import_files([tmp_path / "chats.json"])
    qtbot.waitUntil(lambda: page.presenter.conversation.id == chat.id)
    assert not page.presenter.is_elsewhere


def test_nothing_else_answers_when_the_server_is_gone(page: ChatView, engine: ScriptedEngine) -> None:
    page.presenter.choose_model(remote_name(HERE, "m"))
    write(page)
    engine.reply("Hi")
    remove_endpoint("Here")
    page._endpoints.look_again()
    assert "Here is no longer in the list" in page.sent_note.text()
    write(page, "Are you there?")
    assert len(engine.requests) == 1
    last = page.presenter.model.rows[-1].message
    assert last.state is MessageState.FAILED
    assert "nothing else answers" in last.reason
    page.presenter.choose_model("")
    page.presenter.regenerate(last.id)
    assert engine.requests[1].command.remote is None


def test_it_does_not_wait_for_the_model_on_this_pc(
    saved: Endpoint, open_page: Callable[[], ChatView], engine: ScriptedEngine
) -> None:
    engine.model = None
    page = open_page()
    page.presenter.choose_model(remote_name(HERE, "m"))
    write(page)
    assert len(engine.requests) == 1


def test_new_chats_begin_with_it_if_wanted(page: ChatView, qtbot: QtBot) -> None:
    page.choose_model()
    qtbot.waitUntil(lambda: page.picker.rows.rowCount() >= 3)
    page.picker.filter.setText("small")
    assert page.picker.default_button.text() == "Use in new chats"
    page.picker.default_button.click()
    page.picker.hide()
    assert not page.presenter.is_elsewhere
    write(page)
    page.new_chat()
    assert page.presenter.conversation.model == remote_name(RACK, "org/small")


def test_its_context_is_watched_and_it_writes_the_summary(page: ChatView, engine: ScriptedEngine) -> None:
    page.presenter.choose_model(remote_name(HERE, "m"))
    write(page, "First: " + "word" * 1500)
    engine.reply("Yes: " + "word" * 1500, prompt_tokens=1520)
    assert page.composer.meter.accessibleName().endswith("4,096")
    asked = len(engine.requests)
    write(page, "Second: " + "word" * 1500)
    assert len(engine.requests) == asked
    page.room.banner.fold_button.click()
    summary = engine.requests[-1].command
    assert summary.remote.model == "m"
    engine.reply("They said words.")
    assert "They said words." in engine.requests[-1].command.messages[-1].content  # the second piece goes on with it
    engine.reply("They said more words.")
    assert engine.requests[-1].command.remote is not None
    assert [turn.role for turn in engine.requests[-1].command.messages] == ["system", "user"]
    card = page.presenter.model.rows[0].card
    assert card.fold.model == "m (Here)"
    page.room.open()
    assert "set by" in page.room.popover.cost.text()
    assert page.room.popover.fields.isHidden()
