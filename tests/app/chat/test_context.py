"""A chat that grows beyond its context: told before it is sent, and room made; what cannot be attached is told, too."""

import os
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QUrl
from PySide6.QtGui import QGuiApplication, QImage
from pytestqt.qtbot import QtBot

from app.services.chat_store import Message
from app.services.folding import pieces_of
from app.services.settings import Settings
from app.views.batch.answer_card import TemplateEdit
from app.views.chat.chat_view import ChatView
from app.views.chat.transcript import FoldCard
from app.widgets.fields import TextBox
from engine.common.errors import ErrorCode
from tests.app.chat.chat_page import answered, last_answer, shown, type_and_send
from tests.app.scripted_engine import STARTER, ScriptedEngine


def words(tokens: int) -> str:
    return "word" * tokens  # four letters a token, where the model has no tokenizer


def long_chat(qtbot: QtBot, page: ChatView, engine: ScriptedEngine) -> None:
    for number in range(3):
        answered(qtbot, page, engine, f"Question {number}: {words(600)}", f"Answer {number}: {words(1500)}")


def card(page: ChatView) -> FoldCard:
    turn = page.transcript.turns[0]
    assert isinstance(turn, FoldCard)
    return turn


def sent(engine: ScriptedEngine) -> list[tuple[str, str]]:
    return [(turn.role, turn.content[:10]) for turn in engine.requests[-1].command.messages]


def test_pieces_fit_and_hold_everything() -> None:
    turns = [Message(str(n), "c", None, ("user", "assistant")[n % 2], f"{n} " * (n * 40)) for n in range(12)]  # type: ignore[arg-type]
    pieces = pieces_of(turns, 100, lambda text: len(text) // 4)
    assert all(len(piece) // 4 <= 130 for piece in pieces)
    whole = "".join(pieces)
    assert all(whole.count(f"{n} ") >= n * 38 for n in range(1, 12))
    assert pieces_of([], 100, len) == []


def test_it_is_offered_before_it_is_too_late_and_not_twice(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    type_and_send(qtbot, page, words(3000))
    engine.reply("Yes", prompt_tokens=7600)
    banner = page.room.banner
    assert banner.isVisible()
    assert "Make room" in banner.text
    assert page.composer.meter.property("level") == "full"
    assert "almost full" in page.composer.meter.accessibleName()  # not by colour alone
    banner.later_button.click()
    assert not banner.isVisible()
    page.composer.box.setPlainText("x")
    assert not banner.isVisible()


def test_the_oldest_are_left_out_and_what_was_written_is_sent(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    long_chat(qtbot, page, engine)
    everything = shown(page)
    type_and_send(qtbot, page, words(2500))
    asked = len(engine.requests)
    banner = page.room.banner
    assert banner.isVisible()
    assert page.composer.text
    banner.drop_button.click()
    assert len(engine.requests) == asked + 1
    assert page.composer.text == ""
    assert sent(engine)[0][0] == "user"
    assert sent(engine)[0][1] != "Question 0"
    assert card(page).title == "2 earlier turns are left out" or card(page).title == "4 earlier turns are left out"
    engine.reply("Fine")
    # What is sent is what is shown; the rest is kept, and can be seen and sent again.
    rows = [row for row in page.presenter.model.rows if row.card is None]
    assert [row.message.content for row in rows] == [*(t.content for t in engine.requests[-1].command.messages), "Fine"]
    card(page).show_button.click()
    assert [row.message.content for row in page.presenter.model.rows if row.is_folded] == [
        text
        for _, text in everything[: page.presenter.model.rows[0].card.turns]  # type: ignore[union-attr]
    ]
    card(page).unfold_button.click()
    assert shown(page)[: len(everything)] == everything
    page._undo()
    assert page.presenter.model.rows[0].card is not None


def test_a_summary_is_written_when_the_model_is_idle_and_then_the_message_goes_out(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    long_chat(qtbot, page, engine)
    type_and_send(qtbot, page, words(2500))
    page.room.banner.fold_button.click()
    request = engine.requests[-1].command
    assert request.chat == ""  # nothing of it is kept beside the chat
    assert "Question 0" in request.messages[-1].content
    engine.read(50, 100)
    assert page.room.banner.bar.value() > 0
    assert "Summarising" in page.room.banner.text
    engine.write("They talked ", "about words.")
    asked = len(engine.requests)
    engine.finish()
    assert len(engine.requests) == asked + 1
    first = engine.requests[-1].command.messages[0]
    assert first.role == "system"
    assert first.content.endswith("They talked about words.")
    assert card(page).summary.text() == "They talked about words."
    assert page.presenter.model.rows[0].card.fold.model == "Starter"  # type: ignore[union-attr]
    engine.finish()
    assert not page.room.banner.isVisible()


def test_a_summary_gives_way_and_can_be_cancelled(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    long_chat(qtbot, page, engine)
    page.room.fold()
    summary = engine.requests[-1]
    page.new_chat()
    type_and_send(qtbot, page, "Something else first")
    assert engine.cancelled == [summary.id]
    assert sent(engine) == [("user", "Something ")]
    engine.finish()  # then it begins again
    assert "Question 0" in engine.requests[-1].command.messages[-1].content
    page.presenter.step(1)
    qtbot.waitUntil(page.room.banner.cancel_button.isVisible)
    page.room.banner.cancel_button.click()
    assert engine.cancelled[-1] == engine.requests[-1].id
    assert not page.room.banner.isVisible()
    engine.reply("too late", reason="cancelled")
    assert all(row.card is None for row in page.presenter.model.rows)


def test_a_summary_that_fails_says_why_and_loses_nothing(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    long_chat(qtbot, page, engine)
    before = shown(page)
    page.room.fold()
    engine.fail(ErrorCode.NOT_ENOUGH_MEMORY, "There is not enough memory.")
    assert "not enough memory" in page.notice_banner.text
    page.room.fold()
    engine.finish()
    assert "wrote no summary" in page.notice_banner.text
    assert shown(page) == before


def test_a_changed_draft_is_not_sent_by_a_summary(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    long_chat(qtbot, page, engine)
    type_and_send(qtbot, page, words(2500))
    page.room.banner.fold_button.click()
    page.composer.box.setPlainText("Another thought")
    engine.write("Short.")
    asked = len(engine.requests)
    engine.finish()
    assert len(engine.requests) == asked
    assert page.composer.text == "Another thought"
    assert card(page).summary.text() == "Short."


def test_a_summary_is_edited_and_says_when_its_turns_have_changed(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    long_chat(qtbot, page, engine)
    first = page.presenter.model.rows[1].message.id
    page.edits.fold(first, "Short.", "Starter")
    card(page).edit_button.click()
    editor = card(page).editor
    editor.box.setPlainText("Shorter.")
    editor.save_button.click()
    assert card(page).summary.text() == "Shorter."
    assert "you" in card(page).note.text()
    page.edits.edit(first, "Another answer")
    assert "changed since" in card(page).note.text()
    assert len(page.presenter.model.rows) == 5  # the fold goes along with what follows
    card(page).again_button.click()
    assert "Another answer" in engine.requests[-1].command.messages[-1].content
    engine.reply("Anew.")
    assert card(page).summary.text() == "Anew."
    assert "changed since" not in card(page).note.text()


def test_an_answer_that_runs_into_the_end_says_so_and_offers_room(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    long_chat(qtbot, page, engine)
    type_and_send(qtbot, page, "And?")
    engine.reply("It goes on and", reason="context", prompt_tokens=8000)
    answer = last_answer(page)
    assert "end of the context" in answer.note
    assert answer._note_fold.isVisible()
    assert answer._continue.isVisible()
    answer._note_drop.click()
    assert page.presenter.model.rows[0].card is not None
    answer._continue.click()
    assert sent(engine)[-1][1].startswith("Please con")


def test_the_length_costs_memory_and_needs_a_reload(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    settings = page.room._settings
    page.composer.box.setPlainText("x")
    qtbot.waitUntil(lambda: page.composer.meter.use is not None)
    page.composer.meter.click()
    popover = page.room.popover
    assert popover.isVisible()
    assert "180 MB of RAM" in popover.cost.text()
    assert not popover.reload_button.isVisible()
    popover.slider.setValue(popover.slider.value() - 1)
    assert popover.tokens.value() == 4096
    assert "90 MB of RAM" in popover.cost.text()
    assert popover.reload_button.isVisible()
    assert settings.context_of(STARTER.path) == 4096
    with qtbot.waitSignal(page.reload_wanted):
        popover.reload_button.click()
    page.room.open()
    popover.tokens.setValue(8192)
    assert settings.context_of(STARTER.path) is None  # the model's own


@pytest.mark.parametrize("value", ["x", -5, 3.5, None, [], {"": "a"}])
def test_a_length_that_makes_no_sense_is_the_models_own(tmp_path: Path, qtbot: QtBot, value: object) -> None:
    settings = Settings(tmp_path / "settings.json")
    settings.set("context_tokens", {"m": value} if not isinstance(value, dict) else value)
    assert settings.context_of("m") is None


def write(page: ChatView, text: str) -> None:
    page.composer.box.setPlainText(text)
    page.composer.box.entered.emit()


def _files(*paths: Path, text: str = "") -> QMimeData:
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    if text:
        data.setText(text)
    return data


def test_a_file_never_becomes_its_address(page: ChatView, qtbot: QtBot, tmp_path: Path) -> None:
    notes, model = tmp_path / "notes.pdf", tmp_path / "model.gguf"
    for path in (notes, model):
        path.write_bytes(b"x")
    given = [_files(path, text=path.as_uri()) for path in (notes, model, tmp_path / "gone")]
    for words in (notes.as_uri(), f"x-special/nautilus-clipboard\ncopy\n{notes.as_uri()}\n"):
        given.append(QMimeData())
        given[-1].setText(words)
    for data in given:
        page.presenter.attach_documents(())
        page.composer.box.insertFromMimeData(data)
        assert page.composer.text == ""
        assert len(page.presenter.attachments) == 1
    assert page.presenter.attachments[0].name == "notes.pdf"
    QGuiApplication.clipboard().setMimeData(_files(notes, model))
    page.composer.box.paste()
    assert [one.name for one in page.presenter.attachments] == ["notes.pdf", "model.gguf"]
    qtbot.waitUntil(lambda: all(one.is_read for one in page.presenter.attachments))
    sent = QMimeData()
    sent.setText("see file:///etc/hosts, and\nhttps://example.org")
    page.composer.box.insertFromMimeData(sent)
    assert page.composer.text == sent.text()


@pytest.mark.parametrize("kind", [TextBox, TemplateEdit])
def test_a_file_is_no_text_in_other_boxes(qtbot: QtBot, tmp_path: Path, kind: type[TextBox]) -> None:
    box = kind()
    qtbot.addWidget(box)
    given = _files(tmp_path / "notes.pdf", text=(tmp_path / "notes.pdf").as_uri())
    assert not box.canInsertFromMimeData(given)
    box.insertFromMimeData(given)
    assert box.toPlainText() == ""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in folders here")
def test_a_pipe_with_the_name_of_a_picture_is_not_waited_for(tmp_path: Path) -> None:
    from app.services.pictures import _prepared

    os.mkfifo(tmp_path / "a.png")
    assert _prepared([tmp_path / "a.png"], 0).problems == ("a.png is not a file.",)


def test_a_notice_stays_with_its_chat(page: ChatView, engine: ScriptedEngine) -> None:
    write(page, "Hello")
    engine.finish()
    first = page.presenter.conversation.id
    page.attaching.give([QImage(3, 3, QImage.Format.Format_RGB32)])
    assert page.notice_banner.text.startswith("Starter reads text only.")
    page.new_chat()
    assert not page.notice_banner.isVisible()
    page.presenter.open(first)
    assert page.notice_banner.isVisible()
    page.new_chat()
    page.notice_banner.show_text("Of the whole window.")
    page.presenter.open(first)
    page._dismiss()
    page.new_chat()
    page.presenter.open(first)
    assert not page.notice_banner.isVisible()


def _words(tokens: int) -> str:
    return "word" * tokens  # four letters a token, where the model has no tokenizer


def test_a_chat_over_its_context_is_told_first(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    write(page, _words(5000))
    engine.finish()
    asked = len(engine.requests)
    page.composer.box.setPlainText(_words(4000))
    qtbot.waitUntil(page.room.banner.isVisible)  # while one writes
    assert f"reads {STARTER.context_tokens:,}" in page.room.banner.text
    page.composer.box.entered.emit()
    assert len(engine.requests) == asked
    assert page.composer.text == _words(4000)
    first = page.presenter.conversation.id
    page.room.banner.new_button.click()
    assert page.presenter.conversation.id != first
    assert page.composer.text == _words(4000)
    assert not page.room.banner.isVisible()
    page.composer.box.entered.emit()
    assert len(engine.requests) == asked + 1


def test_it_is_told_at_once_and_can_be_tried_nevertheless(page: ChatView, engine: ScriptedEngine) -> None:
    page.composer.box.setPlainText(_words(9000))
    page.composer.box.entered.emit()
    assert engine.requests == []
    assert "Shorten it." in page.room.banner.text
    assert page.room.banner.new_button.isHidden()  # it would not fit there, either
    page.room.try_anyway()
    assert len(engine.requests) == 1
    assert page.composer.text == ""


def test_editing_and_continuing_are_looked_at_too(page: ChatView, engine: ScriptedEngine) -> None:
    write(page, _words(5000))
    engine.reply(_words(4000))
    question, answer = (row.message.id for row in page.presenter.model.rows)
    asked = len(engine.requests)
    page.transcript.acted.emit(answer, "continue")
    assert page.room.banner.isVisible()
    page.transcript.resent.emit(question, _words(9000))
    assert len(engine.requests) == asked
    assert page.room.banner.new_button.isHidden()  # it would not fit there, either
    page.transcript.resent.emit(question, "Short")
    assert len(engine.requests) == asked + 1


def test_an_edited_message_can_be_asked_in_a_new_chat(page: ChatView, engine: ScriptedEngine) -> None:
    write(page, "Hello")
    engine.finish()
    write(page, _words(5000))
    engine.finish()
    question = [row.message.id for row in page.presenter.model.rows][2]
    first, edited = page.presenter.conversation.id, _words(STARTER.context_tokens - 7)
    page.composer.box.setPlainText("A draft")
    page.transcript.resent.emit(question, edited)
    page.room.banner.new_button.click()
    assert page.composer.text == edited
    page.presenter.open(first)
    assert page.composer.text == "A draft"
