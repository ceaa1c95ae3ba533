"""What else can be done with a message: saved prompts, presets, two answers side by side, every row of a file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.services.chat_store import MessageState
from app.services.kept import Preset
from app.views.chat.chat_view import ChatView
from app.views.chat.side_by_side import SideBySide
from app.widgets.page import BatchDraft
from engine.common.config import SamplingParams
from engine.common.schema import settings_of
from tests.app.chat.chat_page import answered, shown, type_and_send
from tests.app.scripted_engine import STARTER, ScriptedEngine


@pytest.fixture
def prompts(page: ChatView, qtbot: QtBot) -> ChatView:
    """The page with two prompts."""
    kept = page.tools._prompts
    qtbot.waitUntil(lambda: not kept._doing.is_busy)
    kept.put("Translate", "Translate into {{language}}:\n{{text}}")
    kept.put("Greet", "Say hello.")
    return page


def test_a_slash_lists_prompts_and_typing_finds_one(prompts: ChatView, qtbot: QtBot) -> None:
    box, popover = prompts.composer.box, prompts.tools.popover
    qtbot.keyClicks(box, "/")
    assert popover.isVisible()
    qtbot.keyClicks(popover.filter, "gre")
    qtbot.keyClick(popover.filter, Qt.Key.Key_Return)
    assert not popover.isVisible()
    assert prompts.composer.text == "Say hello."
    qtbot.keyClicks(box, "/")  # within a text it is a slash
    assert prompts.composer.text == "Say hello./"
    box.clear()
    qtbot.keyClicks(box, "/")  # a text that begins with one can be written
    qtbot.keyClicks(popover.filter, "etc/hosts")
    qtbot.keyClick(popover.filter, Qt.Key.Key_Return)
    assert prompts.composer.text == "/etc/hosts"
    box.clear()
    prompts.tools.open_prompts()  # variables are asked for and put in
    qtbot.keyClicks(popover.filter, "transl")
    qtbot.keyClick(popover.filter, Qt.Key.Key_Return)
    assert list(popover.fields) == ["language", "text"]
    popover.fields["language"].setPlainText("French")
    popover.fields["text"].setPlainText("one\n{{language}}")
    popover.insert_button.click()
    assert prompts.composer.text == "Translate into French:\none\n{{language}}"


def test_a_message_becomes_a_prompt_that_can_be_changed_and_removed(prompts: ChatView, qtbot: QtBot) -> None:
    popover, kept = prompts.tools.popover, prompts.tools._prompts
    prompts.composer.box.setPlainText("Explain {{thing}} to a child.")
    prompts.tools.open_prompts()
    popover.save_button.click()
    popover.name.setText("Explain")
    popover.keep_button.click()
    assert popover.list.isVisible()
    popover.filter.setText("child")
    popover.edit_button.click()
    popover.name.setText("For children")
    popover.keep_button.click()
    assert [entry.name for entry in kept.entries] == ["For children", "Greet", "Translate"]
    popover.filter.setText("child")
    popover.remove_button.click()
    assert kept.find("for children") is None
    popover.undo_button.click()
    assert kept.find("for children") is not None


def test_presets_are_saved_renamed_used_and_deleted(page: ChatView, qtbot: QtBot) -> None:
    popover, presets = page.composer.sampling_popover, page._presets
    qtbot.waitUntil(lambda: not presets._doing.is_busy)
    page.composer.edit_sampling()
    popover.fields["temperature"].setValue(1.25)
    popover.save_button.click()
    popover.name.setText("Wild")
    qtbot.keyClick(popover.name, Qt.Key.Key_Return)
    assert page.composer.sampling_button.text() == "Wild"
    popover.own_button.click()
    assert page.presenter.conversation.sampling is None
    popover.saved_buttons["Wild"].click()
    sampling = page.presenter.conversation.sampling
    assert sampling.temperature == 1.25
    popover.rename_button.click()
    popover.name.setText("Wilder")
    popover.keep_button.click()
    assert list(popover.saved_buttons) == ["Wilder"]
    popover.default_button.click()
    assert not popover.default_button.isEnabled()
    popover.delete_button.click()
    assert not popover.saved_buttons
    page.presenter.keep()
    page.new_chat()
    assert page.presenter.conversation.sampling == sampling


def test_a_number_is_typed_past_the_models_own_which_is_said(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.3}))
    assert engine.model is not None
    engine.model = replace(engine.model, path=str(tmp_path))
    engine.model_loaded.emit(engine.model)
    page.composer.edit_sampling()
    field = page.composer.sampling_popover.fields["temperature"]
    assert field.value() == 0.3
    field.selectAll()
    qtbot.keyClicks(field, "0.35")
    assert field.value() == 0.35
    # Every field is explained, with the model's own.
    popover = page.composer.sampling_popover
    popover.set_own(replace(popover.own, top_k=40))
    explained = {setting.key for setting in popover._explained.values()}
    assert explained == {each.key for each in settings_of(SamplingParams)}
    popover.fields["top_k"].setFocus()
    popover._explain(popover.fields["top_k"])
    assert popover.explanation.text().startswith("Top-k: ")
    assert popover.explanation.text().endswith("Recommended: 40.")


def compare(page: ChatView, text: str) -> SideBySide:
    page.composer.box.setPlainText(text)
    page.tools.compare()
    dialog = page.side_by_side
    assert dialog is not None
    return dialog


def test_two_settings_answer_at_the_same_time_and_one_goes_on(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    answered(qtbot, page, engine, "before", "yes")
    dialog = compare(page, "Which?")
    creative = dialog.columns[1].sampling
    assert creative != dialog.columns[0].sampling
    dialog.ask_button.click()
    assert page.composer.text == ""
    assert [request.command.sampling == creative for request in engine.requests[1:]] == [False, True]
    assert all(request.command.messages[-1].content == "Which?" for request in engine.requests[1:])
    engine.turn_to(1)
    engine.write("This.")
    engine.finish()
    engine.turn_to(2)
    engine.write("That.")
    engine.finish()
    for column, words in zip(dialog.columns, ("This.", "That."), strict=True):
        assert column.answer.row.message.content == words
        assert column.pick_button.isEnabled()
    dialog.columns[0].pick_button.click()
    assert shown(page)[-2:] == [("user", "Which?"), ("assistant", "This.")]
    assert page.presenter.model.rows[-1].versions == 2
    type_and_send(qtbot, page, "Go on")
    assert [message.content for message in engine.requests[-1].command.messages][-2:] == ["This.", "Go on"]


def test_going_on_with_the_second_takes_its_settings(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    dialog = compare(page, "Which?")
    dialog.columns[1].sampling = Preset.PRECISE.value
    dialog.ask_button.click()
    for number, words in enumerate(("This.", "That.")):
        engine.turn_to(number)
        engine.write(words)
        engine.finish()
    dialog.columns[1].pick_button.click()
    assert shown(page)[-1] == ("assistant", "That.")
    assert page.presenter.conversation.sampling == Preset.PRECISE.value


def test_another_model_is_loaded_when_the_first_has_answered(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    dialog = compare(page, "Which?")
    dialog.columns[1].model.addItem("Other", "/models/other.gguf")
    dialog._choose(dialog.columns[1], "/models/other.gguf")
    loads: list[str] = []
    dialog.load_wanted.connect(loads.append)
    dialog.ask_button.click()
    assert len(engine.requests) == 1
    assert "One model is open at a time" in dialog.columns[1].words.text()
    assert not loads
    engine.write("This.")
    engine.finish()
    assert loads == ["/models/other.gguf"]
    engine.start_loading()
    engine.end_loading(replace(STARTER, name="Other", path="/models/other.gguf"))
    assert len(engine.requests) == 2
    engine.write("That.")
    engine.finish()
    assert not dialog.comparison.is_under_way
    models = [m.model for m in page.presenter.model.tree.messages() if m.role == "assistant"]
    assert models == ["Starter", "Other"]


def test_stopping_both_keeps_what_was_written(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    dialog = compare(page, "Which?")
    dialog.ask_button.click()
    engine.turn_to(0)
    engine.write("Half")
    dialog.ask_button.click()
    assert len(engine.cancelled) == 2
    for number in (0, 1):
        engine.turn_to(number)
        engine.finish("cancelled")
    states = {m.state for m in page.presenter.model.tree.messages() if m.role == "assistant"}
    assert states == {MessageState.PARTIAL}
    assert not dialog.comparison.is_under_way


def test_the_same_way_twice_is_not_asked(page: ChatView, qtbot: QtBot) -> None:
    dialog = compare(page, "Which?")
    dialog.columns[1].sampling = dialog.columns[0].sampling
    dialog._show_sampling()
    assert not dialog.ask_button.isEnabled()
    assert "Choose another" in dialog.note.text()


def test_a_message_is_handed_to_batch_as_it_is_asked_here(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    sampling = SamplingParams(temperature=0.3)
    page.presenter.set_sampling(sampling)
    page.presenter.set_system_prompt("Be brief.")
    answered(qtbot, page, engine, "Sum up {{text}}", "yes")
    drafts: list[BatchDraft] = []
    page.batch_wanted.connect(drafts.append)
    turn = page.transcript.turns[0]
    turn._to_rows()
    actions = {action.text(): action for action in page.tools.menu().actions()}
    actions["Ask this of every row of a file…"].trigger()
    assert drafts == [BatchDraft("Sum up {{text}}", "Be brief.", sampling)] * 2
