"""What is told before a message is sent: what cannot be attached, in its chat alone, and that a chat is too long."""

import os
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QUrl
from PySide6.QtGui import QGuiApplication, QImage
from pytestqt.qtbot import QtBot

from app.views.batch.answer_card import TemplateEdit
from app.views.chat.chat_view import ChatView
from app.widgets.fields import TextBox
from tests.app.scripted_engine import STARTER, ScriptedEngine


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
    engine.write(_words(4000))
    engine.finish()
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
