"""What a model thinks before its answer: a line that opens, and never a part of the answer."""

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.models.conversation import MessageRow
from app.services.chat_store import AnswerStats, Message, MessageState
from app.services.kept import THINKING_TOKENS, Preset, own_sampling
from app.theme import colours
from app.views.chat.answer_message import AnswerMessage
from app.views.chat.chat_view import ChatView
from app.views.chat.phrases import thought_text
from app.views.chat.thought import Thought
from engine.common.errors import ErrorCode
from tests.app.chat.chat_page import last_answer, type_and_send
from tests.app.scripted_engine import STARTER, ScriptedEngine


def thought_of(page: ChatView) -> Thought:
    thought = last_answer(page).thought
    assert thought is not None
    return thought


def after(widget: QWidget) -> QWidget | None:
    """What the Tab key goes to next, if it is shown."""
    at = widget.nextInFocusChain()
    while at is not None and at.focusPolicy() == Qt.FocusPolicy.NoFocus:
        at = at.nextInFocusChain()
    return at


def test_a_thought_is_one_quiet_line_that_says_how_long_it_takes(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    type_and_send(qtbot, page, "Where?")
    answer = last_answer(page)
    assert answer.thought is None
    engine.think("Let me ", "see.")
    qtbot.waitUntil(lambda: answer._row.message.reasoning == "Let me see.")
    thought = thought_of(page)
    assert thought.isVisible()
    assert thought.header.text().startswith("Thinking… ")
    assert thought.header.accessibleName() == "Thinking"
    assert answer.figures.startswith("thinking")
    assert thought._tick.isActive()
    assert not answer.body.isVisible()
    engine.write("In **Paris**.")
    qtbot.waitUntil(lambda: answer.body.markdown() == "In **Paris**.")
    assert thought.header.text() == "Thought for 1 s"
    assert not thought._tick.isActive()
    assert answer.figures.startswith("writing")
    engine.finish()
    assert answer.figures == "24.6 tokens/s  ·  first token 0.80 s  ·  3 tokens"
    assert thought.body is None  # folded, none of it is laid out
    answer._copy.click()
    assert QGuiApplication.clipboard().text() == "In **Paris**."


def test_a_thought_opens_by_keyboard_and_grows_while_it_is_open(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    type_and_send(qtbot, page, "Where?")
    engine.think("Let *me*")
    thought = thought_of(page)
    header = thought.header
    assert header.focusPolicy() & Qt.FocusPolicy.TabFocus
    assert header.isCheckable()
    assert "folded" in header.accessibleDescription()
    assert after(header) is thought.copy_button
    assert after(thought.copy_button) is last_answer(page).body
    qtbot.keyClick(header, Qt.Key.Key_Space)
    body = thought.body
    assert "unfolded" in header.accessibleDescription()
    assert body.accessibleName() == "What the model thought"
    assert body.theme().text == colours().muted
    appended: list[str] = []
    original = body.append_markdown
    body.append_markdown = lambda text: (appended.append(text), original(text))  # type: ignore[method-assign]
    engine.think(" see.")
    qtbot.waitUntil(lambda: body.markdown() == "Let *me* see.")
    assert appended == [" see."]  # what is there is not drawn again
    engine.write("Paris.")
    engine.finish()
    qtbot.waitUntil(lambda: not body._is_streaming)
    thought.copy_button.click()
    assert QGuiApplication.clipboard().text() == "Let *me* see."
    qtbot.keyClick(header, Qt.Key.Key_Space)
    assert not body.isVisible()
    assert not thought.copy_button.isVisible()


def test_the_next_prompt_hands_the_thought_to_the_template(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    type_and_send(qtbot, page, "Where?")
    engine.think("Hm.")
    engine.write("Paris.")
    engine.finish()
    type_and_send(qtbot, page, "Sure?")
    sent = engine.requests[-1].command.messages
    told = [("Where?", ""), ("Paris.", "Hm."), ("Sure?", "")]
    assert [(message.content, message.reasoning) for message in sent] == told
    engine.think("Cut in the mid")
    engine.finish("cancelled")
    answer = last_answer(page)
    assert thought_of(page).header.text().startswith("Thought")
    assert answer.figures.endswith("stopped")
    answer.acted.emit("regenerate")
    assert engine.requests[-1].command.messages == sent
    engine.write("Yes.")
    engine.finish()
    assert last_answer(page).thought is None
    last_answer(page).version_stepped.emit(-1)
    assert last_answer(page)._row.message.reasoning == "Cut in the mid"
    assert not thought_of(page).isHidden()


def test_a_thought_is_kept_when_the_engine_dies(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    type_and_send(qtbot, page, "Where?")
    engine.think("Hm.")
    engine.fail(ErrorCode.INTERNAL, "It broke.")
    assert last_answer(page)._row.message.state is MessageState.PARTIAL
    assert "The text so far is kept." in last_answer(page).note


def test_a_thought_that_took_all_the_room_says_what_to_do(qtbot: QtBot) -> None:
    stats = AnswerStats("length", generated_tokens=9)
    message = Message("a", "c", "q", "assistant", "", reasoning="Hm", reasoning_s=3, stats=stats)
    answer = AnswerMessage(MessageRow(message))
    qtbot.addWidget(answer)
    assert "Max tokens" in answer.note
    answer.set_row(MessageRow(replace(message, stats=replace(stats, finish_reason="context"))))
    assert "make room" in answer.note
    answer.set_row(MessageRow(replace(message, content="Paris.")))
    assert answer.note == ""


@pytest.mark.parametrize(
    ("seconds", "thinking", "words"),
    [(0.2, False, "Thought for 1 s"), (12.4, False, "Thought for 12 s"), (185, False, "Thought for 3 min"),
     (0, False, "Thought"), (4, True, "Thinking… 4 s")],
)  # fmt: skip
def test_times_of_thoughts_in_words(seconds: float, thinking: bool, words: str) -> None:
    assert thought_text(seconds, thinking=thinking) == words


def test_how_much_to_think_is_chosen_where_the_model_knows_it(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    popover = page.composer.sampling_popover
    page.composer.edit_sampling()
    assert not popover.thinking.isVisible()
    thinker = replace(STARTER, thinking=("off", "low", "medium", "high"), thinks=True)
    engine.end_loading(thinker)
    assert popover.thinking.isVisible()
    assert popover.thinking.accessibleName() == "Thinking"
    assert [popover.thinking.itemText(n) for n in range(popover.thinking.count())] == [
        "As the model does", "Off", "Low", "Medium", "High",
    ]  # fmt: skip
    popover.thinking.setFocus()
    qtbot.keyClick(popover.thinking, Qt.Key.Key_End)
    assert page.composer.sampling_button.text() == "Recommended"
    assert page.composer.sampling_button.toolTip().endswith("thinking high")
    type_and_send(qtbot, page, "Where?")
    asked = engine.requests[-1].command.sampling
    assert asked == replace(own_sampling(thinker), thinking="high")
    assert asked.max_tokens == THINKING_TOKENS
    engine.finish()
    popover.presets[Preset.PRECISE].click()
    assert popover.sampling() == replace(Preset.PRECISE.value, thinking="high", max_tokens=THINKING_TOKENS)
    popover.set_model(replace(STARTER, thinking=("off", "on")))
    assert popover.thinking.currentText() == "On"
    popover.set_model(STARTER)
    assert not popover.thinking.isVisible()
    assert popover.sampling().thinking == "high"
