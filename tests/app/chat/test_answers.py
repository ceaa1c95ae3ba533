"""A question and its answer, its versions and branches."""

from typing import Any

from PySide6.QtCore import Qt, QTimer
from pytestqt.qtbot import QtBot

from app.services.kept import Preset
from app.views.chat.chat_view import ChatView
from engine.common.errors import ErrorCode
from tests.app.chat.chat_page import answered, last_answer, shown, titles, type_and_send
from tests.app.scripted_engine import ScriptedEngine


def test_a_question_and_its_answer(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    assert "Starter" in page.empty.hint
    type_and_send(qtbot, page, "What is the capital of France?")
    assert page.composer.text == ""
    assert page.title_bar.title == "What is the capital of France?"
    assert [message.content for message in engine.requests[0].command.messages] == ["What is the capital of France?"]
    assert engine.requests[0].command.sampling == Preset.BALANCED.value
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


def test_what_gave_way_and_how_long_pictures_took_stands_under_the_answer(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    gone = "The graphics card stopped responding, so the model runs on the CPU now."
    more: dict[str, Any]
    for more, words in (
        ({"gave_way": gone}, gone),
        ({"pictures": 1, "pictures_kept": 0, "pictures_s": 0.4}, "picture read in 0.40 s"),
        ({"pictures": 1, "pictures_kept": 1, "pictures_s": 0.4}, "picture read before"),
        ({"pictures": 3, "pictures_kept": 0, "pictures_s": 0.4}, "3 pictures read in 0.40 s"),
        ({"pictures": 3, "pictures_kept": 3, "pictures_s": 0.4}, "3 pictures read before"),
        (
            {"pictures": 3, "pictures_kept": 2, "pictures_s": 0.4},
            "2 of 3 pictures read before, the others in 0.40 s",
        ),
    ):
        type_and_send(qtbot, page, "What is in them?")
        engine.write("A cat.")
        engine.finish(**more)
        assert last_answer(page).figures.endswith(f"  ·  {words}")


def test_shift_enter_starts_a_line_and_the_box_grows_and_an_empty_one_sends_nothing(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    one = page.composer.box.height()
    qtbot.keyClick(page.composer.box, Qt.Key.Key_Return)
    qtbot.keyClicks(page.composer.box, "a")
    qtbot.keyClick(page.composer.box, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    qtbot.keyClicks(page.composer.box, "b")
    assert page.composer.text == "a\nb"
    assert shown(page) == []
    box = page.composer.box
    box.setPlainText("a\nb\nc")
    three = box.height()
    box.setPlainText("\n".join("abcdefghijklmnopqrstuvwxyz"))
    assert one < three < box.height() < 400
    button = page.empty.examples[0]
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    assert engine.requests[0].command.messages[0].content == button.text()


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


def test_regenerating_makes_a_version_to_leaf_through(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "q", "first")
    last_answer(page).acted.emit("regenerate")
    assert [m.content for m in engine.requests[1].command.messages] == ["q"]
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
    assert titles(page) == ["Branch: one", "one"]
    answered(qtbot, page, engine, "else", "3")
    assert [m.content for m in engine.requests[-1].command.messages] == ["one", "1", "else"]


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
    assert last_answer(page).figures == "reading the prompt"
    engine.turn_to(0)
    engine.write("two")
    page.presenter.open(first)
    qtbot.waitUntil(lambda: last_answer(page).body.markdown() == "one two")
    engine.finish()
    assert shown(page)[-1] == ("assistant", "one two")
    engine.turn_to(1)
    engine.write("other")
    engine.finish()
    page.presenter.step(-1)
    assert shown(page) == [("user", "second chat"), ("assistant", "other")]


def test_tokens_are_gathered_and_not_drawn_one_by_one(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    type_and_send(qtbot, page, "write a lot")
    answer = last_answer(page)
    appended: list[str] = []
    original = answer.body.append_markdown
    answer.body.append_markdown = lambda text: (appended.append(text), original(text))  # type: ignore[method-assign]
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
