"""Documents in chats: attached, read, given to the model whole or in passages, cited, kept, refused in a sentence."""

import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QFileDialog, QWidget
from pytestqt.qtbot import QtBot

from app.services.chat_store import Attachment, ChatStore, Message, Source
from app.services.documents import service
from app.services.documents.index import FILE_NAME, DocumentIndex
from app.views.chat.attachment_row import PassageDialog
from app.views.chat.chat_view import ChatView
from engine.batch_files.documents import DocumentReader
from engine.common.paths import data_dir
from engine.remote.endpoint import Found, endpoint_at, save_endpoint
from tests.app.chat.chat_page import last_answer
from tests.app.scripted_engine import ScriptedEngine
from tests.made_documents import bomb, docx, pdf

LONG = [f"Page {number} tells of weather and wind.\nNothing else is on it.\n" * 12 for number in range(1, 41)]
LONG[26] += "\nThe vault of Zanzibar opens with the word heliotrope."


def settled(page: ChatView, qtbot: QtBot) -> tuple[Attachment, ...]:
    """What goes with the next message, once it has been read."""
    qtbot.waitUntil(lambda: all(one.is_read for one in page.presenter.attachments), timeout=20_000)
    return page.presenter.attachments


def attach(page: ChatView, qtbot: QtBot, *paths: Path) -> tuple[Attachment, ...]:
    page.attaching.give(list(paths))
    return settled(page, qtbot)


def ask(page: ChatView, engine: ScriptedEngine, qtbot: QtBot, text: str) -> str:
    """What the model was given to read with a question."""
    before = len(engine.requests)
    page.composer.box.setPlainText(text)
    QTest.keyClick(page.composer.box, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: len(engine.requests) > before, timeout=20_000)
    return str(engine.requests[-1].command.messages[-1].content)


def answer(engine: ScriptedEngine, text: str) -> None:
    engine.reply(text)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.pdf"
    path.write_bytes(pdf(LONG, titles=[("Beginning", 0), ("The vault", 25)]))
    return path


def test_a_short_document_is_given_whole_and_cited(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path
) -> None:
    (one,) = attach(page, qtbot, docx(tmp_path / "note.docx", ["# Prices", "Pears cost 3 euros.", "Plums cost 4."]))
    (chip,) = page.composer.attachments.chips
    assert (one.problem, one.characters > 20) == ("", True)
    assert "tokens" in chip.accessibleName()
    given = ask(page, engine, qtbot, "What do pears cost?")
    assert "[1] note.docx, Prices:\nPrices\n\nPears cost 3 euros." in given
    assert given.endswith("What do pears cost?")
    assert page.presenter.attachments == ()
    assert page.composer.attachments.isHidden()
    answer(engine, "They cost 3 euros [1].")
    (button,) = last_answer(page).sources.buttons
    assert button.text() == "[1] note.docx"
    answer_again = ask(page, engine, qtbot, "And plums?")
    assert answer_again == "And plums?"
    assert "Plums cost 4." in engine.requests[-1].command.messages[0].content  # where it came, so that a prefix is kept
    answer(engine, "4 euros.")
    assert [one.text() for one in last_answer(page).sources.buttons] == ["[1] note.docx"]  # the best, as none is cited


def test_of_a_long_document_the_passage_is_given_and_opens_marked(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.presenter.document_room = lambda _texts: 1500
    (one,) = attach(page, qtbot, book)
    assert one.pages == 40
    assert "40 pages" in page.composer.attachments.chips[0].accessibleName()
    given = ask(page, engine, qtbot, 'Which "word" opens the vault (of Zanzibar) AND NOT * anything OR NEAR?')
    assert "The vault of Zanzibar opens with the word heliotrope." in given
    assert "page 27, The vault:" in given
    assert len(given) < 8000
    answer(engine, "Heliotrope [2].")
    message = page.presenter.model.rows[-1].message
    assert all(source.text for source in message.sources)
    number = next(source.number for source in message.sources if "heliotrope" in source.text)
    answering = page.presenter.model.rows[-1].message
    page.presenter.model.update(replace(answering, content=f"Heliotrope [{number}]."))
    (button,) = last_answer(page).sources.buttons
    assert button.text() == f"[{number}] book.pdf p. 27"
    assert "page 27" in button.accessibleName()
    button.click()
    (dialog,) = page.findChildren(PassageDialog)
    qtbot.waitUntil(lambda: "heliotrope" in dialog.text.toPlainText())
    (marked,) = dialog.text.extraSelections()
    assert "heliotrope" in marked.cursor.selectedText()  # type: ignore[attr-defined]
    assert len(dialog.text.toPlainText()) > len(marked.cursor.selectedText())  # type: ignore[attr-defined]
    dialog.close()


def test_a_question_about_all_of_it_gets_pieces_from_all_over_and_what_was_asked_of_opens(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, book: Path
) -> None:
    page.presenter.document_room = lambda _texts: 1500
    attach(page, qtbot, book)
    given = ask(page, engine, qtbot, "Summarise!")
    assert "[1] book.pdf, page 1, Beginning:" in given
    assert "[3]" in given
    answer(engine, "None.")
    turn = page.transcript.turns[0]
    QTest.keyClick(turn.attachments.chips[0], Qt.Key.Key_Return)
    (dialog,) = page.findChildren(PassageDialog)
    qtbot.waitUntil(lambda: dialog.text.toPlainText().startswith("Page 1 tells"))
    dialog.close()
    QApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    page._open_source(Source(1, "unknown", "a.pdf", 3))
    (gone,) = page.findChildren(PassageDialog)
    qtbot.waitUntil(lambda: "no longer there" in gone.text.placeholderText())
    gone.close()
    QApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


def test_documents_outlive_a_restart_edits_and_branches_and_go_with_their_chats(
    page: ChatView,
    open_page: Callable[[], ChatView],
    engine: ScriptedEngine,
    store: ChatStore,
    qtbot: QtBot,
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("The harbour master is called Ingrid.")
    (one,) = attach(page, qtbot, path)
    ask(page, engine, qtbot, "Who is the harbour master?")
    answer(engine, "Ingrid [1].")
    path.unlink()
    first = page.presenter.model.rows[0].message
    page._resend(first.id, "Who runs the harbour?")
    qtbot.waitUntil(lambda: len(engine.requests) == 2)
    assert "called Ingrid" in engine.requests[1].command.messages[0].content
    answer(engine, "Ingrid [1].")
    page.presenter.branch(page.presenter.model.rows[-1].message.id)
    branch = page.presenter.conversation.id
    assert page.presenter.model.rows[0].message.attachments == (replace(one, tokens=_tokens(page)),)
    assert store.flush()
    page.documents.close()
    (data_dir() / FILE_NAME).write_bytes(b"no index any more" * 500)
    again = open_page()
    again.presenter.open(branch)
    qtbot.waitUntil(lambda: again.presenter.conversation.id == branch)
    assert again.presenter.model.rows[-1].message.sources[0].attachment == one.id
    ask(again, engine, qtbot, "Sure?")
    assert "called Ingrid" in engine.requests[-1].command.messages[0].content
    answer(engine, "Yes.")
    gone: list[set[str]] = []
    store.documents_gone.connect(gone.append)
    others = [entry.conversation.id for entry in again.presenter.list_model.entries if entry.conversation is not None]
    for chat in others:
        with qtbot.waitSignal(store.documents_gone):
            again.presenter.delete(chat)
    assert sorted(map(len, gone)) == [0, 1]  # the other chat still had it
    assert again.presenter.undo()


def _tokens(page: ChatView) -> int:
    return page.presenter.model.rows[0].message.attachments[0].tokens


def test_what_is_not_sent_yet_is_kept_and_read_on(
    page: ChatView, open_page: Callable[[], ChatView], store: ChatStore, qtbot: QtBot, book: Path, tmp_path: Path
) -> None:
    (tmp_path / "b.txt").write_text("short")
    page.attaching.give([book, tmp_path / "b.txt"])
    page.documents.close()  # while they are being read
    assert store.flush()
    again = open_page()
    again.presenter.open(page.presenter.conversation.id)
    qtbot.waitUntil(lambda: len(again.presenter.attachments) == 2)
    assert [(one.name, one.pages) for one in settled(again, qtbot)] == [("book.pdf", 40), ("b.txt", 0)]
    chips = again.composer.attachments.chips
    assert chips[0].button is not None
    QTest.keyClick(chips[0].button, Qt.Key.Key_Space)
    assert [one.name for one in again.presenter.attachments] == ["b.txt"]
    QTest.keyClick(again.composer.attachments.chips[0], Qt.Key.Key_Delete)
    assert again.presenter.attachments == ()
    assert again.composer.attachments.isHidden()


def test_sending_waits_for_a_document_that_is_being_read_and_can_be_stopped(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, real = threading.Event(), DocumentReader.read

    def slow(*values: object, **named: object) -> object:
        may_go_on.wait(20)
        return real(*values, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(DocumentReader, "read", slow)
    page.attaching.give([book])
    assert "Reading" in page.composer.attachments.chips[0].accessibleName()
    page.composer.box.setPlainText("What word?")
    QTest.keyClick(page.composer.box, Qt.Key.Key_Return)
    assert last_answer(page).figures == "searching the documents"
    assert page.presenter.stop()
    assert page.presenter.answering_id is None
    page.presenter.regenerate(page.presenter.model.rows[-1].message.id)
    assert not engine.requests
    may_go_on.set()
    qtbot.waitUntil(lambda: len(engine.requests) == 1, timeout=20_000)
    assert "book.pdf, page" in engine.requests[0].command.messages[-1].content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "node_modules").mkdir()
    (folder / "README.md").write_text("# Lighthouse\nThe keeper is Magnus.")
    (folder / "src" / "lamp.py").write_text("def burn():\n    return 'paraffin'\n")
    (folder / ".git" / "config.txt").write_text("hidden words")
    (folder / "node_modules" / "x.js").write_text("hidden words")
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    return folder


def test_a_folder_is_read_watched_and_asked(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = attach(page, qtbot, folder)
    assert (one.kind, one.files, one.problem) == ("folder", 2, "")
    given = ask(page, engine, qtbot, "What burns in the lamp?")
    assert "src/lamp.py:\ndef burn():\n    return 'paraffin'" in given
    assert "hidden" not in given
    answer(engine, "Paraffin.")
    page.documents._poll.setInterval(50)  # as where the system tells nothing
    (folder / "src" / "lamp.py").write_text("def burn():\n    return 'electric light'\n")
    (folder / "README.md").unlink()
    (folder / "new.txt").write_text("The fog horn is blue.")

    def files() -> int:
        return page.presenter.model.rows[0].message.attachments[0].characters

    before = files()
    qtbot.waitUntil(lambda: files() != before, timeout=20_000)
    qtbot.waitUntil(lambda: not page.documents._pending)
    given = ask(page, engine, qtbot, "Which colour has the fog horn?")
    whole = "".join(message.content for message in engine.requests[-1].command.messages)
    assert "fog horn is blue" in whole
    assert "electric light" in whole
    assert "Magnus" not in whole


def test_of_a_folder_with_too_many_files_the_rest_is_left_out(
    page: ChatView, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_FILES", 3)
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"text {number}")
    (one,) = attach(page, qtbot, folder)
    assert one.files == 3
    assert "more than 3 files" in one.remark
    monkeypatch.setattr(service, "MOST_ENTRIES", 5)
    other = folder / "src"
    for number in range(10):
        (other / f"{number}.bin").write_text("")
    assert "more than 5 entries" in attach(page, qtbot, other)[1].remark


def test_a_folder_with_very_much_text_or_one_that_is_gone_says_so(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_FOLDER_CHARACTERS", 10)
    (one,) = attach(page, qtbot, folder)
    assert one.files == 1
    assert "more than 10 characters" in one.remark
    moved = folder.rename(folder.parent / "moved")
    page.documents._look_again()
    qtbot.waitUntil(lambda: "not there any more" in page.presenter.attachments[0].problem)
    assert ask(page, engine, qtbot, "Who is the keeper?").endswith("Who is the keeper?")
    answer(engine, "Nobody knows.")
    moved.rename(folder)
    page.documents._look_again()
    qtbot.waitUntil(lambda: not page.presenter.model.rows[0].message.attachments[0].problem)


def test_bad_files_say_so_on_their_chips_and_the_chat_goes_on(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path
) -> None:
    names = ("scan.pdf", "secret.pdf", "huge.pdf", "bomb.docx", "rubbish.bin", "gone.txt")
    paths = {name: tmp_path / name for name in names}
    paths["scan.pdf"].write_bytes(pdf(["", ""]))
    paths["secret.pdf"].write_bytes(pdf(["hidden"], password="x"))
    with paths["huge.pdf"].open("wb") as file:
        file.truncate(500 * 10**6)
    bomb(paths["bomb.docx"])
    paths["rubbish.bin"].write_bytes(os.urandom(4000))
    found = {one.name: one.problem for one in attach(page, qtbot, *paths.values())}
    words = ("scan", "password", "500 MB", "zip bomb", "neither text", "cannot be read")
    for name, word in zip(names, words, strict=True):
        assert word in found[name], name
    for chip in page.composer.attachments.chips:
        assert chip.accessibleName().startswith(f"{chip.attachment.name}: This file ")
        assert chip.accessibleName().endswith(".")
    assert ask(page, engine, qtbot, "Hello?") == "Hello?"
    answer(engine, "Hello.")
    assert not last_answer(page).sources.buttons


def test_they_are_dropped_on_every_part_of_the_chat(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path
) -> None:
    ask(page, engine, qtbot, "Hi")
    answer(engine, "# Hello\n\n```\ncode\n```\n")
    turn = page.transcript.turns[0]
    turn.start_editing()
    QTest.qWait(10)
    data = QMimeData()
    parts = [page.composer, page.composer.box.viewport(), page.transcript.viewport(), last_answer(page), page.title_bar]
    parts += [page.panel, turn, *last_answer(page).body.findChildren(QWidget)]
    parts += [turn.editor.viewport(), page.sent_note]
    for number, part in enumerate(parts):
        path = tmp_path / f"{number}.txt"
        path.write_text("words")
        data.setUrls([QUrl.fromLocalFile(str(path))])
        _drop(part, data)
        assert len(page.presenter.attachments) == number + 1, part
    assert page.composer.text == ""
    assert turn.editor.toPlainText() == "Hi"
    settled(page, qtbot)


def _drop(part: QWidget, data: QMimeData) -> None:
    """As Qt delivers it: to the first that takes drops there, from the inside out."""
    at: QWidget | None = part
    buttons, keys = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    while at is not None:
        if at.acceptDrops():
            enter = QDragEnterEvent(at.rect().center(), Qt.DropAction.CopyAction, data, buttons, keys)
            enter.ignore()
            QApplication.sendEvent(at, enter)
            if enter.isAccepted():
                place = QPointF(at.rect().center())
                QApplication.sendEvent(at, QDropEvent(place, Qt.DropAction.CopyAction, data, buttons, keys))
                return
        at = at.parentWidget()
    raise AssertionError(f"nothing takes what is dropped on {part}")


def test_files_and_folders_are_chosen_by_a_button(page: ChatView, qtbot: QtBot, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    for number, title in enumerate(("Attach files", "Attach a folder"), start=1):
        menu = page.composer.attach_menu()
        menu.actions()[number - 1].trigger()
        menu.deleteLater()
        (dialog,) = page.findChildren(QFileDialog)
        assert dialog.windowTitle() == title
        dialog.filesSelected.emit([str(tmp_path / "a.txt" if number == 1 else tmp_path)])
        dialog.close()
        QApplication.sendPostedEvents(dialog, QEvent.Type.DeferredDelete)
        assert len(page.presenter.attachments) == number
    assert [one.kind for one in settled(page, qtbot)] == ["file", "folder"]


def test_files_in_the_clipboard_are_attached_sent_without_a_text_and_never_logged(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    (tmp_path / "a.txt").write_text("sesquipedalian")
    data = QMimeData()
    data.setText(f"{QUrl.fromLocalFile(str(tmp_path / 'a.txt')).toString()}\n")  # as some file managers copy
    QGuiApplication.clipboard().setMimeData(data)
    page.composer.box.paste()
    assert [one.name for one in settled(page, qtbot)] == ["a.txt"]
    assert page.composer.text == ""
    page.composer.box.paste()  # the same again
    assert len(page.presenter.attachments) == 1
    assert page.composer.send_button.isEnabled()
    given = ask(page, engine, qtbot, "")
    assert "[1] a.txt:\nsesquipedalian" in given
    assert page.presenter.conversation.title == "a.txt"
    assert isinstance(page.presenter.model.rows[0].message, Message)
    answer(engine, "Long.")
    ask(page, engine, qtbot, "What is sesquipedalian?")
    assert "sesquipedalian" not in caplog.text


def test_without_an_index_the_chat_says_so_and_goes_on(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_index: DocumentIndex) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(DocumentIndex, "_connected", refuse)
    (tmp_path / "a.txt").write_text("words")
    (one,) = attach(page, qtbot, tmp_path / "a.txt")
    assert one.problem.startswith("could not be indexed (database or disk is full")
    assert ask(page, engine, qtbot, "What?") == "What?"
    answer(engine, "Nothing.")
    assert "without them" in page.notice_banner.text


def test_the_chip_says_when_it_goes_to_another_server(
    open_page: Callable[[], ChatView], qtbot: QtBot, tmp_path: Path
) -> None:
    save_endpoint(
        endpoint_at("http://10.9.8.7:8080/v1", "Office", model="m", found=Found("llama.cpp", "", ("m",), (0,)))
    )
    page = open_page()
    (tmp_path / "a.txt").write_text("words")
    attach(page, qtbot, tmp_path / "a.txt")
    assert "goes to" not in page.composer.attachments.chips[0].accessibleName()
    page.presenter.choose_model("endpoint:Office/m")
    assert "goes to Office" in page.composer.attachments.chips[0].accessibleName()
    page._send("What is it?")
    assert "documents" in page.question.informativeText()
    page.question.reject()


def test_no_file_is_read_and_no_index_asked_on_the_windows_thread(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, folder: Path, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(real: Callable[..., object]) -> Callable[..., object]:
        def note(*values: object, **named: object) -> object:
            threads.append(threading.current_thread())
            return real(*values, **named)

        return note

    for owner, name in ((DocumentIndex, "_mending"), (DocumentReader, "read"), (service, "_walk"), (service, "given")):
        monkeypatch.setattr(owner, name, noted(getattr(owner, name)))
    attach(page, qtbot, folder, book)
    ask(page, engine, qtbot, "What burns in the lamp?")
    answer(engine, "Paraffin.")
    last_answer(page).sources.buttons[0].click()
    (dialog,) = page.findChildren(PassageDialog)
    qtbot.waitUntil(lambda: bool(dialog.text.toPlainText()))
    dialog.close()
    assert len(threads) > 8
    assert threading.main_thread() not in threads


def test_an_import_brings_texts_but_names_no_place_to_read(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("The harbour master is called Ingrid.")
    attach(page, qtbot, tmp_path / "a.txt")
    ask(page, engine, qtbot, "Who?")
    answer(engine, "Ingrid [1].")
    chat, files = page.presenter.conversation.id, page.transfer.files
    with qtbot.waitSignal(files.exported):
        page.transfer.export([chat], tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    assert "called Ingrid" in text
    assert str(tmp_path) not in text
    (tmp_path / "out.json").write_text(text.replace('"path": ""', '"path": "/etc"'))
    page.presenter.delete(chat)
    with qtbot.waitSignal(files.imported):
        page.transfer.import_files([tmp_path / "out.json"])
    qtbot.waitUntil(lambda: len(page.presenter.model.rows) == 2)
    (one,) = page.presenter.model.rows[0].message.attachments
    assert (one.name, one.path, one.is_read) == ("a.txt", "", True)
    assert page.presenter.model.rows[1].message.sources[0].attachment == one.id
    given = ask(page, engine, qtbot, "Again?")
    assert given == "Again?"
    assert "called Ingrid" in engine.requests[-1].command.messages[0].content
