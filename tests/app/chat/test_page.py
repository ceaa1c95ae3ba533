"""What belongs to the page: settings of a chat, copying, scrolling, colours, links."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QDesktopServices, QGuiApplication
from PySide6.QtWidgets import QAbstractButton, QLineEdit, QPlainTextEdit
from pytestqt.qtbot import QtBot

from app.services.chat_store import ChatStore, Conversation, Message
from app.services.kept import Preset
from app.theme import DARK, ThemeController
from app.views.chat.chat_view import ChatView
from app.widgets.sampling_popover import sampling_words
from engine.common.config import SamplingParams
from tests.app.chat.chat_page import answered, last_answer, type_and_send
from tests.app.scripted_engine import ScriptedEngine


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
