"""The chat page: questions, answers, what a model thinks first, versions, settings of a chat, scrolling, links."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt, QTimer, QUrl
from PySide6.QtGui import QDesktopServices, QGuiApplication
from PySide6.QtWidgets import QAbstractButton, QLineEdit, QPlainTextEdit, QWidget
from pytestqt.qtbot import QtBot

from app.models.conversation import MessageRow
from app.services.chat_store import AnswerStats, ChatStore, Conversation, Message, MessageState
from app.services.kept import THINKING_TOKENS, Preset, own_sampling
from app.theme import DARK, ThemeController, colours
from app.views.chat.answer_message import AnswerMessage
from app.views.chat.chat_view import ChatView
from app.views.chat.phrases import thought_text
from app.views.chat.thought import Thought
from app.widgets.sampling_popover import sampling_words
from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from tests.app.chat.chat_page import answered, last_answer, shown, titles, type_and_send
from tests.app.scripted_engine import STARTER, ScriptedEngine


def test_sampling_and_system_prompt_belong_to_the_chat(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    page.composer.edit_sampling()
    card = page.composer.sampling_popover
    card.presets[Preset.PRECISE].click()
    assert page.composer.sampling_button.text() == "Precise"
    card.fields["temperature"].setValue(1.25)
    card.fields["stop"].setText(r"END, \n\n")
    card.fields["seed"].setValue(7)
    assert page.composer.sampling_button.text() == "Custom"
    qtbot.keyClick(card.fields["temperature"], Qt.Key.Key_Escape)
    assert card.isHidden()
    page.composer.edit_system_prompt()
    page.composer.system_popover.text.setPlainText("You are brief.")
    qtbot.mouseClick(page.transcript, Qt.MouseButton.LeftButton)
    assert page.composer.system_popover.isHidden()
    type_and_send(qtbot, page, "q")
    messages, sampling = engine.requests[0].command.messages, engine.requests[0].command.sampling
    assert (messages[0].role, messages[0].content) == ("system", "You are brief.")
    assert (sampling.temperature, sampling.stop, sampling.seed) == (1.25, ("END", "\n\n"), 7)
    engine.finish()
    page.new_chat()
    assert page.presenter.conversation.sampling is None


def test_a_chat_without_settings_of_its_own_takes_those_of_the_model_that_answers(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path
) -> None:
    suggested = {"do_sample": True, "temperature": 0.3, "min_p": 0.1, "dry_multiplier": 0.8}
    (tmp_path / "generation_config.json").write_text(json.dumps(suggested))
    assert engine.model is not None
    engine.model = replace(engine.model, path=str(tmp_path))
    engine.model_loaded.emit(engine.model)
    page.composer.edit_sampling()
    card = page.composer.sampling_popover
    assert card.own_button.isChecked()
    assert (card.fields["temperature"].value(), card.fields["dry_multiplier"].value()) == (0.3, 0.8)
    pill = page.composer.sampling_button
    for tip in (pill.toolTip(), card.own_button.toolTip(), card.own_button.accessibleDescription()):
        assert sampling_words(card.own) in tip
    assert [part.split()[-1] for part in sampling_words(card.own).split(", ")] == ["0.3", "0.1", "0.8"]
    card.presets[Preset.CREATIVE].click()
    assert sampling_words(Preset.CREATIVE.beside(card.own)) in pill.toolTip()
    stored = page.presenter.conversation.sampling
    assert stored == replace(Preset.CREATIVE.value, dry_multiplier=0.8)
    card.fields["dry_multiplier"].setValue(0.0)
    assert not card.fields["dry_breakers"].isEnabled()
    assert page.presenter.conversation.sampling == Preset.CREATIVE.value
    card.own_button.click()
    assert page.presenter.conversation.sampling is None
    type_and_send(qtbot, page, "q")
    sent = engine.requests[0].command.sampling
    assert (sent.temperature, sent.min_p, sent.dry_multiplier, sent.max_tokens) == (0.3, 0.1, 0.8, 1024)
    for sampling in (  # the card gives back what it shows
        SamplingParams(stop=("a,b", "\n\n", ", c"), dry_breakers=("\n", ",", "</think>")),
        SamplingParams(dry_multiplier=1.25, dry_base=2.5, dry_allowed_length=4, dry_range=0, dry_breakers=()),
        SamplingParams(temperature=0.5, seed=3, beams=4),
    ):
        card.fill(sampling)
        shown = card.sampling()
        assert replace(shown, stop=(), dry_breakers=()) == replace(sampling, stop=(), dry_breakers=())
        for texts, given in ((shown.stop, sampling.stop), (shown.dry_breakers, sampling.dry_breakers)):
            assert texts == tuple(text.strip(" ") for text in given)


def test_copying_gives_the_text_and_everything_has_a_name(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "my question", "an **answer**")
    last_answer(page)._copy.click()
    assert QGuiApplication.clipboard().text().strip() == "an **answer**"
    first = page.transcript.turns[0]
    first._buttons[0].click()
    assert QGuiApplication.clipboard().text() == "my question"
    # For those who cannot see it.
    for kind in (QAbstractButton, QLineEdit, QPlainTextEdit):
        for widget in page.findChildren(kind):
            if widget.isVisible() and widget.focusPolicy() != Qt.FocusPolicy.NoFocus:
                assert widget.accessibleName() or getattr(widget, "text", str)(), widget


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
        for n in range(120)
    ]
    store.create(Conversation("long", "Long", created_at=1.0, updated_at=1.0), messages)
    page.presenter.open("long")
    qtbot.waitUntil(lambda: len(page.presenter.model.rows) == 120)
    built = len(page.transcript.turns)
    assert built < 120
    for number in (1, 119):  # not built yet, and built
        page.presenter.model.update(replace(messages[number], content="grown"))
    assert len(page.transcript.turns) == built, "an answer that grows does not have everything built at once"
    qtbot.waitUntil(lambda: len(page.transcript.turns) == 120, timeout=60_000)
    assert [turn.message_id for turn in page.transcript.turns] == [message.id for message in messages]
    for number in (1, 119):
        turn = page.transcript.turns[number]
        assert turn.body.markdown() == "grown"


def test_colours_follow_the_theme(page: ChatView, engine: ScriptedEngine, theme: ThemeController, qtbot: QtBot) -> None:
    answered(qtbot, page, engine, "q", "a")
    theme.set_choice("dark")
    corner = page.title_bar.grab().toImage().pixelColor(2, 2)
    assert corner.name().upper() == DARK.surface
    theme.set_font_px(20)
    assert page.transcript.turns[-1].maximumWidth() > 680


def test_links_open_only_if_they_are_of_the_web(page: ChatView, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(QDesktopServices, "openUrl", lambda url: opened.append(url.toString()))
    for url in ("https://example.org/", "file:///etc/passwd", "javascript:alert(1)"):
        page.transcript.link_activated.emit(QUrl(url))
    assert opened == ["https://example.org/"]


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
    engine.reply("Paris.")
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
    engine.reply("Paris.")
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
    engine.reply("Yes.")
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
        engine.reply("A cat.", **more)
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
    engine.reply("second")
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
    engine.reply("3")
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
    engine.reply("other")
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
