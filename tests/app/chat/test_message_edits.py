"""What can be done with a message: edited, found, compared, made a prompt, asked of every row; folders of chats."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QModelIndex, QPoint, QPointF, Qt
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QAbstractSlider, QLineEdit
from pytestqt.qtbot import QtBot

from app.services.chat_store import ChatStore, MessageState
from app.services.kept import Preset
from app.views.chat.answer_message import AnswerMessage
from app.views.chat.chat_view import ChatView
from app.views.chat.side_by_side import SideBySide
from app.widgets.page import BatchDraft
from engine.common.config import SamplingParams
from engine.common.kept_context import folder_of, kept_context_dir
from engine.common.paths import data_dir
from engine.common.schema import settings_of
from tests.app.chat.chat_page import answered, shown, titles, type_and_send
from tests.app.scripted_engine import STARTER, ScriptedEngine


def talk(qtbot: QtBot, page: ChatView, engine: ScriptedEngine) -> list[str]:
    """Two questions and their answers; their ids."""
    answered(qtbot, page, engine, "One walrus?", "A **walrus**, then another walrus.")
    answered(qtbot, page, engine, "Two?", "Second answer.")
    return [row.message.id for row in page.presenter.model.rows]


def answered_later(qtbot: QtBot, page: ChatView, engine: ScriptedEngine, question: str, answer: str) -> None:
    """As `answered`, where documents are looked into first."""
    before = len(engine.requests)
    type_and_send(qtbot, page, question)
    qtbot.waitUntil(lambda: len(engine.requests) > before, timeout=20_000)
    engine.reply(answer)


def ids(page: ChatView) -> list[str]:
    return [row.message.id for row in page.presenter.model.rows]


def reopened(open_page: Callable[[], ChatView], store: ChatStore, qtbot: QtBot, chat: str) -> ChatView:
    assert store.flush()
    page = open_page()
    page.presenter.open(chat)
    qtbot.waitUntil(lambda: page.presenter.conversation.id == chat)
    return page


def test_a_turn_in_the_middle_is_deleted_and_comes_back(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot, open_page: Callable[[], ChatView]
) -> None:
    before = talk(qtbot, page, engine)
    page.transcript.acted.emit(before[1], "delete")
    assert ids(page) == [before[0], *before[2:]]
    assert "deleted" in page.toast.text
    type_and_send(qtbot, page, "Three?")
    sent = [turn.content for turn in engine.requests[-1].command.messages]
    assert sent == ["One walrus?\n\nTwo?", "Second answer.", "Three?"]
    engine.finish()
    other = reopened(open_page, store, qtbot, page.presenter.conversation.id)
    assert ids(other)[:3] == [before[0], *before[2:]]
    page._undo()
    assert ids(page)[:4] == before


def test_the_last_turn_is_deleted_and_a_version_takes_its_place(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    before = talk(qtbot, page, engine)
    page.presenter.regenerate(before[3])
    engine.reply("Third answer.")
    latest = ids(page)[3]
    page.edits.delete(latest)
    assert ids(page) == before
    page.edits.delete(before[3])
    assert ids(page) == before[:3]
    page._undo()
    page._undo()
    assert ids(page) == [*before[:3], latest]


def test_an_answer_is_edited_and_both_versions_keep_what_followed(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot, open_page: Callable[[], ChatView]
) -> None:
    before = talk(qtbot, page, engine)
    answer = page.transcript.turns[1]
    answer.start_editing()
    answer.editor.box.setPlainText("A seal.")
    qtbot.keyClick(answer.editor.box, Qt.Key.Key_Return, Qt.KeyboardModifier.ControlModifier)
    assert [text for _, text in shown(page)] == ["One walrus?", "A seal.", "Two?", "Second answer."]
    edited = page.transcript.turns[1]
    assert "edited" in edited.figures
    assert edited.note == ""
    changed = ids(page)
    page.presenter.step_version(changed[1], -1)
    assert ids(page) == before
    page.presenter.step_version(before[1], 1)
    assert ids(reopened(open_page, store, qtbot, page.presenter.conversation.id)) == changed
    page._undo()
    assert ids(page) == before
    assert page.presenter.model.rows[1].versions == 1


def test_a_question_is_changed_without_asking_again(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    talk(qtbot, page, engine)
    asked = len(engine.requests)
    question = page.transcript.turns[0]
    question.start_editing()
    question.editor.setPlainText("One seal?")
    question._save()
    assert len(engine.requests) == asked
    assert [text for _, text in shown(page)][0::2] == ["One seal?", "Two?"]
    type_and_send(qtbot, page, "Three?")  # what follows the new version keeps it
    page._undo()
    assert shown(page)[0][1] == "One walrus?"
    assert page.presenter.model.rows[0].versions == 2


def test_nothing_is_changed_while_an_answer_is_written(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    before = talk(qtbot, page, engine)
    type_and_send(qtbot, page, "Three?")
    page.edits.delete(before[0])
    page.edits.edit(before[0], "Other")
    assert ids(page)[:4] == before
    assert "stop it first" in page.toast.text


def test_find_counts_marks_and_steps(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    talk(qtbot, page, engine)
    page.find_in_chat()
    bar = page.find_bar
    qtbot.keyClicks(bar.field, "WALRUS")
    qtbot.waitUntil(lambda: bar.count.text() == "1 of 3")
    for words in ("2 of 3", "3 of 3", "1 of 3"):
        qtbot.keyClick(bar.field, Qt.Key.Key_Return)
        assert bar.count.text() == words
    qtbot.keyClick(bar.field, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    assert bar.count.text() == "3 of 3"
    bar.field.setText("giraffe")
    qtbot.waitUntil(lambda: bar.count.text() == "not in this chat")
    bar.field.setText("answer")
    qtbot.waitUntil(lambda: bar.count.text() == "1 of 1")
    answered(qtbot, page, engine, "Three?", "One more answer.")
    qtbot.waitUntil(lambda: bar.count.text() == "1 of 2")
    qtbot.keyClick(bar.field, Qt.Key.Key_Escape)
    assert not bar.isVisible()
    page.edits.fold(ids(page)[1], "Animals.")
    page.finding.open("walrus")  # what is folded is shown, and found
    qtbot.waitUntil(lambda: bar.count.text() == "1 of 3")


def test_a_search_opens_at_its_hit_with_it_marked(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    before = talk(qtbot, page, engine)
    first = page.presenter.conversation.id
    page.new_chat()
    page.panel.search.setText("answer sec")
    qtbot.waitUntil(lambda: page.presenter.list_model.rowCount() == 1)
    page.panel._open_index(page.presenter.list_model.index(0))
    assert page.presenter.conversation.id == first
    qtbot.waitUntil(lambda: page.find_bar.count.text() == "1 of 1")
    assert page.find_bar.field.text() == "Second answer"
    assert page.finding._found[0][0] == before[3]


def test_a_hit_below_long_answers_is_in_sight_and_stays_so_until_people_scroll(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot, open_page: Callable[[], ChatView]
) -> None:
    for number in range(8):
        answered(qtbot, page, engine, f"Question {number}?", "Vermilion secateurs." if number == 5 else "Short.")
    for number in (7, 6, 4, 3, 2, 1, 0):
        long = "\n\n".join([f"Answer {number}. " + "Water the roses in the evening. " * 30] * 30)
        page.edits.edit(ids(page)[2 * number + 1], long)
    assert store.flush()
    page = open_page()
    page.new_chat()
    page.panel.search.setText("vermilion secateurs")
    qtbot.waitUntil(lambda: page.presenter.list_model.rowCount() == 1)
    page.panel._open_index(page.presenter.list_model.index(0))
    qtbot.waitUntil(lambda: page.find_bar.count.text() == "1 of 1")

    def is_in_sight() -> bool:
        turn = page.transcript.turn(page.finding._found[0][0])
        top = turn.mapTo(page.transcript.viewport(), QPoint(0, 0)).y()
        return 0 <= top < page.transcript.viewport().height()

    def is_laid_out() -> bool:
        turns = [turn for turn in page.transcript.turns if isinstance(turn, AnswerMessage)]
        return all(turn.height() > 2000 or len(turn.row.message.content) < 100 for turn in turns)

    qtbot.waitUntil(is_laid_out, timeout=20_000)
    qtbot.waitUntil(is_in_sight)
    bar = page.transcript.verticalScrollBar()
    bar.triggerAction(QAbstractSlider.SliderAction.SliderToMinimum)
    page.resize(page.width() - 40, page.height())
    qtbot.wait(50)
    assert bar.value() == 0


def test_nothing_of_a_scratch_chat_is_stored(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot, tmp_path: Path
) -> None:
    page.new_scratch()
    chat = page.presenter.conversation.id
    assert page.scratch_banner.isVisible()
    page.presenter.set_system_prompt("secret walrus")
    before = talk(qtbot, page, engine)
    page.edits.edit(before[1], "A secret seal")
    page.edits.fold(before[1], "A secret summary")
    (tmp_path / "notes.txt").write_text("The secret otter is called Ottilie.")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "more.txt").write_text("The secret beaver is called Bert.")
    page.attaching.give([tmp_path / "notes.txt", tmp_path / "folder"])
    qtbot.waitUntil(lambda: all(one.is_read for one in page.presenter.attachments), timeout=20_000)
    answered_later(qtbot, page, engine, "What are otter and beaver called?", "Ottilie and Bert [1] [2].")
    given = str(engine.requests[-1].command.messages[-1].content)
    assert "called Ottilie" in given
    assert "called Bert" in given
    page.composer.box.setPlainText("a secret draft")
    page.presenter.flush()
    assert all(request.command.chat == "" for request in engine.requests)
    assert not folder_of(chat, kept_context_dir()).exists()
    page.new_chat()
    assert not page.scratch_banner.isVisible()
    page.presenter.open(chat)  # as long as the window is open it is there
    assert shown(page)[0] == ("user", "One walrus?")
    assert store.flush()
    with closing(sqlite3.connect(store.path)) as connection:
        for table in ("conversations", "messages", "folds"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    kept = [path for path in data_dir().rglob("*") if path.is_file()]
    assert store.path in kept
    assert not [path for path in kept if any(word in path.read_bytes() for word in (b"secret", b"Ottilie", b"Bert"))]
    sources = page.presenter.model.rows[-1].message.sources
    page.presenter.delete(chat)
    found = list[tuple[str, str, str]]()
    page.documents.surroundings(replace(sources[0], text=""), found.append)
    qtbot.waitUntil(lambda: bool(found))
    assert found == [("", "", "")]
    assert "gone" in page.toast.text
    assert not page.presenter.undo() or page.presenter.conversation.id != chat
    assert page.presenter.list_model.conversation(chat) is None


def test_a_scratch_chat_is_kept_after_all(
    page: ChatView,
    engine: ScriptedEngine,
    store: ChatStore,
    qtbot: QtBot,
    open_page: Callable[[], ChatView],
    tmp_path: Path,
) -> None:
    page.new_scratch()
    before = talk(qtbot, page, engine)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "more.txt").write_text("The beaver is called Bert.")
    (tmp_path / "notes.txt").write_text("The otter is called Ottilie.")
    page.attaching.give([tmp_path / "notes.txt", folder])
    qtbot.waitUntil(lambda: all(one.is_read for one in page.presenter.attachments), timeout=20_000)
    answered_later(qtbot, page, engine, "What are they called?", "Ottilie and Bert.")
    (tmp_path / "late.txt").write_text("The mole is called Marlene.")
    page.attaching.give([tmp_path / "late.txt"])
    page.presenter.keep_scratch()  # while it is being read
    assert not page.scratch_banner.isVisible()
    some = page.presenter._documents_of(page.presenter.conversation.id)
    qtbot.waitUntil(lambda: [page.documents.share(id_) for id_ in some] == [None] * 3, timeout=20_000)
    for name in ("notes.txt", "late.txt"):
        (tmp_path / name).unlink()
    page.documents.close()
    again = reopened(open_page, store, qtbot, page.presenter.conversation.id)
    assert ids(again)[:4] == before
    assert [one.name for one in again.presenter.attachments] == ["late.txt"]
    qtbot.waitUntil(lambda: [again.documents.share(id_) for id_ in some] == [None] * 3, timeout=20_000)
    answered_later(qtbot, again, engine, "Who is the otter, the beaver, the mole?", "They.")
    given = " ".join(str(each.content) for each in engine.requests[-1].command.messages)
    assert [name for name in ("called Ottilie", "called Bert", "called Marlene") if name not in given] == []


def test_folders_are_filled_emptied_and_deleted(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot, open_page: Callable[[], ChatView]
) -> None:
    chats = []
    for number in range(3):
        page.new_chat()
        answered(qtbot, page, engine, f"Chat {number}", "Yes")
        chats.append(page.presenter.conversation.id)
    model = page.presenter.list_model
    page.folders.make([chats[0]])
    (folder,) = model.folders
    editor = page.panel.list.findChild(QLineEdit)
    editor.setText("  Work  at home ")
    qtbot.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: [each.name for each in model.folders] == ["Work at home"])
    # By drag: onto the folder's line, and out of it onto a heading.
    row = model.row_of_folder(folder.id)
    assert row is not None
    dragged = model.mimeData([model.index(model.row_of(chats[1]) or 0)])
    assert model.canDropMimeData(dragged, Qt.DropAction.MoveAction, -1, -1, model.index(row))
    at = page.panel.list.visualRect(model.index(row)).center()
    kind = Qt.DropAction.MoveAction, dragged, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    page.panel.list.dropEvent(QDropEvent(QPointF(at), *kind))
    assert {c.id for c in model.in_folder(folder.id)} == set(chats[:2])
    model.dropMimeData(dragged, Qt.DropAction.MoveAction, -1, -1, QModelIndex())
    assert [c.id for c in model.in_folder(folder.id)] == chats[:1]
    # By keyboard: collapse, expand, delete.
    page.panel.list.setCurrentIndex(model.index(model.row_of_folder(folder.id) or 0))
    qtbot.keyClick(page.panel.list, Qt.Key.Key_Left)
    assert model.row_of(chats[0]) is None
    qtbot.keyClick(page.panel.list, Qt.Key.Key_Right)
    assert model.row_of(chats[0]) is not None
    assert store.flush()
    again = open_page()
    (kept,) = again.presenter.list_model.folders
    assert kept.name == "Work at home"
    assert [c.id for c in again.presenter.list_model.in_folder(kept.id)] == chats[:1]
    page.folders._delete(kept, ())
    assert model.folders == ()
    assert set(titles(page)) == {"Chat 0", "Chat 1", "Chat 2"}
    page._undo()
    assert [c.id for c in model.in_folder(folder.id)] == chats[:1]
    page.folders._delete(kept, model.in_folder(kept.id))
    assert set(titles(page)) == {"Chat 1", "Chat 2"}
    page._undo()
    assert [c.id for c in model.in_folder(folder.id)] == chats[:1]
    page.folders.delete(folder.id)
    page.folders.question.close()
    assert len(model.folders) == 1


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
    engine.reply("This.")
    engine.turn_to(2)
    engine.reply("That.")
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
        engine.reply(words)
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
    engine.reply("This.")
    assert loads == ["/models/other.gguf"]
    engine.start_loading()
    engine.end_loading(replace(STARTER, name="Other", path="/models/other.gguf"))
    assert len(engine.requests) == 2
    engine.reply("That.")
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
