"""Pictures in chats that another server answers: attached, made small, shown, sent, kept, and refused in a sentence."""

import base64
import json
import os
import sqlite3
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QMimeData, QObject, QPointF, QSize, Qt, QUrl
from PySide6.QtGui import QColor, QDragEnterEvent, QDropEvent, QGuiApplication, QImage, QImageReader
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QFileDialog, QLabel, QWidget
from pytestqt.qtbot import QtBot
from shiboken6 import delete

from app.services import pictures as picture_service
from app.services.chat_store import ChatStore, Conversation, Message
from app.services.chat_store.recovery import open_checked, recover
from app.services.pictures import (
    MOST_SIDE_PX,
    Pictures,
    Prepared,
    Source,
    Thumbnail,
    Thumbnails,
    made,
    size_of,
    sources_in,
)
from app.views.chat.attachment_row import PictureRow
from app.views.chat.chat_view import ChatView
from engine.checkpoint.library import LibraryEntry
from engine.common.chat import Picture
from engine.common.errors import ErrorCode
from engine.common.paths import python_module
from engine.common.pictures import MOST_PICTURES, picture_of, read_picture
from engine.remote.endpoint import Found, endpoint_at, save_endpoint, saved_endpoints
from tests.app.scripted_engine import STARTER, ScriptedEngine, seer
from tests.made_pictures import MADE, endless, png_of

HERE = endpoint_at("http://127.0.0.1:8080/v1", "Here", model="m", found=Found("llama.cpp", "", ("m", "blind"), (0, 0)))


def image(width: int = 40, height: int = 30, *, clear: bool = False) -> QImage:
    found = QImage(width, height, QImage.Format.Format_ARGB32)
    found.fill(QColor(0, 0, 0, 0) if clear else QColor("teal"))
    return found


@pytest.fixture
def page(open_page: Callable[[], ChatView]) -> ChatView:
    save_endpoint(HERE)
    found = open_page()
    found.presenter.choose_model("endpoint:Here/m")
    return found


def attach(page: ChatView, qtbot: QtBot, *sources: Source) -> tuple[Picture, ...]:
    with qtbot.waitSignal(page.presenter.attached):
        page.attaching.give(sources or (image(),))
    return page.presenter.pictures


def write(page: ChatView, text: str = "") -> None:
    page.composer.box.setPlainText(text)
    QTest.keyClick(page.composer.box, Qt.Key.Key_Return)


def prepared(qtbot: QtBot, *sources: Source) -> Prepared:
    service, found = Pictures(), list[Prepared]()
    service.prepare(sources, (), found.append)
    qtbot.waitUntil(lambda: bool(found))
    service.close()
    return found[0]


@pytest.mark.parametrize(("name", "media"), [("a.png", "png"), ("a.jpg", "jpeg"), ("a.webp", "png"), ("a.gif", "png")])
def test_each_kind_of_file_becomes_one_that_every_server_reads(
    qtbot: QtBot, tmp_path: Path, name: str, media: str
) -> None:
    file = tmp_path / name
    if name.endswith("gif"):  # Qt writes none
        file.write_bytes(base64.b64decode("R0lGODlhAQABAIAAAAUEBAAAACwAAAAAAQABAAACAkQBADs="))
    else:
        assert image().save(str(file))
    (found,) = prepared(qtbot, file).pictures
    assert found.media == f"image/{media}"
    assert size_of(found).width() in (40, 1)


def test_what_is_large_is_scaled_down_and_what_a_camera_wrote_stays_here(qtbot: QtBot, tmp_path: Path) -> None:
    large = image(5000, 1000)
    large.setText("Place", "51.5 N")
    file = tmp_path / "large.png"
    large.save(str(file))
    assert b"51.5 N" in file.read_bytes()
    (found,) = prepared(qtbot, file).pictures
    assert (size_of(found).width(), size_of(found).height()) == (MOST_SIDE_PX, MOST_SIDE_PX // 5)
    assert b"51.5 N" not in base64.b64decode(found.data)
    assert prepared(qtbot, image(clear=True)).pictures[0].media == "image/png"


def test_what_is_no_picture_is_said_once_each(qtbot: QtBot, tmp_path: Path) -> None:
    text, torn = tmp_path / "a.png", tmp_path / "torn.png"
    text.write_text("no picture")
    image(300, 300).save(str(torn))
    torn.write_bytes(torn.read_bytes()[:60])
    found = prepared(qtbot, text, torn, tmp_path / "gone.png", image())
    assert len(found.pictures) == 1
    assert [each.split()[0] for each in found.problems] == ["a.png", "torn.png", "gone.png"]
    assert all(each.endswith(".") for each in found.problems)


def test_they_are_sent_before_the_text_and_shown_in_the_chat(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    assert not page.composer.send_button.isEnabled()
    (picture,) = attach(page, qtbot)
    assert page.composer.send_button.isEnabled()
    assert page.composer.pictures.isVisible()
    write(page, "What is it?")
    (message,) = engine.requests[0].command.messages
    assert json.loads(message.parts) == [
        {"type": "image_url", "image_url": {"url": picture.url}},
        {"type": "text", "text": "What is it?"},
    ]
    assert page.presenter.pictures == ()
    assert page.composer.pictures.isHidden()
    shown = page.transcript.turns[0].findChildren(PictureRow)[0]
    assert shown.findChildren(QLabel)[0].accessibleName() == "Picture 1 of 1, 40 by 30 pixels"
    engine.reply("Teal.")
    write(page, "Really?")
    assert [bool(each.parts) for each in engine.requests[1].command.messages] == [True, False, False]
    engine.finish()
    page._resend(page.presenter.model.rows[0].message.id, "And now?")  # an edited message keeps them
    assert json.loads(engine.requests[2].command.messages[0].parts)[0]["image_url"]["url"] == picture.url


def places(row: QWidget) -> list[QLabel]:
    return [label for label in row.findChildren(QLabel) if label.property("picture")]


def captions(row: QWidget) -> list[str]:
    return [label.text() for label in row.findChildren(QLabel) if not label.property("picture")]


def test_a_model_on_this_pc_that_sees_is_sent_them_and_says_what_they_cost(
    open_page: Callable[[], ChatView], engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path
) -> None:
    engine.model = seer(tmp_path)
    page = open_page()
    (picture,) = attach(page, qtbot, image(640, 320))
    assert page.sent_note.isHidden()
    assert captions(page.composer.pictures) == ["640 × 320 · 202 tokens"]
    assert places(page.composer.pictures)[0].accessibleDescription() == "640 × 320 · 202 tokens"
    assert page.room._pictures() == 202
    qtbot.waitUntil(lambda: page.composer.meter.use is not None and page.composer.meter.use.used >= 202)
    write(page, "What is it?")
    (message,) = engine.requests[0].command.messages
    assert [part["type"] for part in json.loads(message.parts)] == ["image_url", "text"]
    engine.reply("Teal.")
    page.presenter.regenerate(page.presenter.model.rows[-1].message.id)
    assert engine.requests[1].command.messages == engine.requests[0].command.messages
    engine.finish()
    page._resend(page.presenter.model.rows[0].message.id, "And now?")
    assert picture.url in engine.requests[2].command.messages[0].parts
    engine.finish()
    page.presenter.branch(page.presenter.model.rows[-1].message.id)
    write(page, "Again?")
    assert picture.url in engine.requests[3].command.messages[0].parts


def test_what_reads_text_only_says_which_model_here_would_see(
    open_page: Callable[[], ChatView], engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path
) -> None:
    page = open_page()
    names = ("One", "Two", "Three", "Four")
    page._library._entries = tuple(LibraryEntry(name, tmp_path / name, sees=True) for name in names)
    page.attaching.give([image()])
    words = "Starter reads text only. On this PC these see pictures: One, Two, Three and 1 more."
    assert page.notice_banner.text == words
    assert page.presenter.pictures == ()
    # Those that are attached when another model is loaded are kept, and it is said that they are not read.
    engine.model = seer(tmp_path)
    attach(page, qtbot)
    engine.model = STARTER
    engine.model_loaded.emit(STARTER)
    assert page.sent_note.text().startswith("This model reads text only: the pictures in this chat are not read.")
    qtbot.waitUntil(lambda: captions(page.composer.pictures) == ["40 × 30"])
    write(page, "What is it?")
    assert engine.requests[0].command.messages[0].parts == ""
    engine.finish()
    engine.model = seer(tmp_path)
    engine.model_loaded.emit(engine.model)
    assert page.sent_note.isHidden()
    write(page, "And now?")
    assert engine.requests[1].command.messages[0].parts


def test_what_would_be_read_for_ever_is_not_begun(qtbot: QtBot, tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(endless())
    assert prepared(qtbot, file).problems == ("a.jpg is damaged and cannot be shown.",)
    picture = Picture("image/jpeg", base64.b64encode(endless()).decode())
    assert made(picture, QSize(10, 10)).image.isNull()


def test_other_kinds_are_refused_by_name(page: ChatView, qtbot: QtBot, tmp_path: Path) -> None:
    for name, data, kind in (
        ("a.heic", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        ("a.png", b"\0\0\0\x1cftypavif\0\0\0\0avifmif1", "AVIF"),
        ("a.svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        ("a.tif", b"nothing", "TIF"),
    ):
        file = tmp_path / name
        file.write_bytes(data)
        page.attaching.give([file])
        words = f"{name} is in the {kind} format, which is not read here: save it as PNG or JPEG."
        qtbot.waitUntil(lambda words=words: page.notice_banner.text == words)
    assert page.presenter.pictures == ()


def test_a_picture_takes_its_place_at_once_and_is_decoded_once_off_the_windows_thread(
    page: ChatView, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(picture: Picture, most: QSize) -> Thumbnail:
        threads.append(threading.current_thread())
        return made(picture, most)

    monkeypatch.setattr(picture_service, "made", noted)
    attach(page, qtbot, image(1000, 500))
    (place,) = places(page.composer.pictures)
    assert place.property("picture") == "awaited"
    assert place.accessibleName() == "Picture 1 of 1, 1000 by 500 pixels"
    size = place.size()
    qtbot.waitUntil(lambda: not place.pixmap().isNull())
    assert place.size() == size == place.pixmap().size()
    write(page, "What is it?")
    (again,) = places(page.transcript.turns[0].findChildren(PictureRow)[0])
    assert not again.pixmap().isNull()  # it was kept
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_no_picture_is_decoded_for_what_is_gone(qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, seen = threading.Event(), list[Picture]()

    def slow(picture: Picture, most: QSize) -> Thumbnail:
        seen.append(picture)
        may_go_on.wait(10)
        return made(picture, most)

    monkeypatch.setattr(picture_service, "made", slow)
    service, shown = Thumbnails(), list[Thumbnail]()
    pictures = prepared(qtbot, *(image(10 + n, 10) for n in range(4))).pictures
    receivers = [QObject() for _ in pictures]
    for picture, receiver in zip(pictures, receivers, strict=True):
        assert service.ask(picture, QSize(50, 50), receiver, shown.append) is None
    for receiver in receivers[:3]:
        delete(receiver)
    may_go_on.set()
    qtbot.waitUntil(lambda: bool(shown))
    assert seen == [pictures[0], pictures[3]]  # the first had begun
    assert [each.pixels.width() for each in shown] == [13]
    may_go_on.clear()
    service.ask(pictures[1], QSize(50, 50), service, shown.append)
    service.ask(pictures[2], QSize(50, 50), service, shown.append)
    may_go_on.set()
    service.close()
    qtbot.wait(1)
    assert len(shown) == 1
    assert pictures[2] not in seen


def test_a_damaged_one_says_so(page: ChatView, qtbot: QtBot) -> None:
    torn = base64.b64encode(base64.b64decode(prepared(qtbot, image(300, 300)).pictures[0].data)[:60]).decode()
    page.presenter.attach((Picture("image/png", torn), Picture("image/png", "bm9uZQ==")))
    write(page, "What are they?")
    row = page.transcript.turns[0].findChildren(PictureRow)[0]
    qtbot.waitUntil(lambda: [place.text() for place in places(row)] == ["damaged picture"] * 2)
    assert places(row)[1].accessibleName() == "Picture 2 of 2"
    qtbot.waitUntil(lambda: all(row.rect().contains(place.geometry()) for place in places(row)))


def test_a_photo_of_a_camera_takes_little_memory(qtbot: QtBot, tmp_path: Path) -> None:
    large = QImage(8000, 5000, QImage.Format.Format_Grayscale8)
    large.fill(80)
    file = tmp_path / "photo.jpg"
    assert large.save(str(file))
    usual = QImageReader.allocationLimit()
    QImageReader.setAllocationLimit(32)  # MB: all of it takes 40
    try:
        (found,) = prepared(qtbot, file).pictures
        assert not made(found, QSize(176, 88)).image.isNull()
    finally:
        QImageReader.setAllocationLimit(usual)
    assert size_of(found) == QSize(MOST_SIDE_PX, 1280)


def test_whatever_a_camera_or_a_program_writes_is_read_as_the_engine_reads_it(qtbot: QtBot, tmp_path: Path) -> None:
    """Moving ones, CMYK, 16 bits, palettes, turned by EXIF."""
    files = [tmp_path / f"{number}.{name.split(',')[0].lower()}" for number, name in enumerate(MADE)]
    for file, make in zip(files, MADE.values(), strict=True):
        file.write_bytes(make())
    found = prepared(qtbot, *files)
    assert found.problems == ()
    for (name, make), ours in zip(MADE.items(), found.pictures, strict=True):
        wanted = read_picture(picture_of(make(), name), name)
        got = read_picture(ours, name)
        assert got.size == wanted.size, name
        apart = np.abs(np.asarray(got, np.int16) - np.asarray(wanted, np.int16)).mean()
        assert apart < (40 if "CMYK" in name else 10), (name, apart)


@pytest.mark.parametrize("size", [(20_000, 20_000), (60_000, 1_000)])
def test_bombs_are_not_unpacked(qtbot: QtBot, tmp_path: Path, size: tuple[int, int]) -> None:
    file = tmp_path / "bomb.png"
    file.write_bytes(png_of(*size))
    assert prepared(qtbot, file).problems == ("bomb.png has too many pixels: make it smaller first.",)


def test_a_message_may_be_a_picture_alone(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    attach(page, qtbot)
    write(page)
    assert len(json.loads(engine.requests[0].command.messages[0].parts)) == 1
    assert page.presenter.conversation.title == "Picture"
    engine.finish()
    page.presenter.choose_model("")
    page.presenter.regenerate(page.presenter.model.rows[-1].message.id)
    assert [each.content for each in engine.requests[1].command.messages] == ["[a picture]"]


def test_they_are_pasted_dropped_and_chosen_and_taken_away_again(page: ChatView, qtbot: QtBot, tmp_path: Path) -> None:
    QGuiApplication.clipboard().setImage(image())
    with qtbot.waitSignal(page.presenter.attached):
        page.composer.box.paste()
    file = tmp_path / "a.png"
    image().save(str(file))
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(file)), QUrl.fromLocalFile(str(tmp_path / "notes.txt"))])
    enter = QDragEnterEvent(
        page.rect().center(), Qt.DropAction.CopyAction, data, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    )
    page.dragEnterEvent(enter)
    assert enter.isAccepted()
    drop = QDropEvent(
        QPointF(5, 5), Qt.DropAction.CopyAction, data, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    )
    with qtbot.waitSignal(page.presenter.attached):
        page.dropEvent(drop)
    page.attaching.choose()
    (dialog,) = page.findChildren(QFileDialog)
    with qtbot.waitSignal(page.presenter.attached):
        dialog.filesSelected.emit([str(file)])
    dialog.close()
    qtbot.waitUntil(lambda: len(page.presenter.pictures) == 3)
    assert page.composer.pictures.buttons[0].accessibleName() == "Remove picture 1"
    QTest.keyClick(page.composer.pictures.buttons[0], Qt.Key.Key_Space)
    assert len(page.presenter.pictures) == 2
    assert page.focusWidget() is page.composer.box
    text = QMimeData()
    text.setText("words")
    text.setImageData(image())
    assert sources_in(text) == []  # a spreadsheet's cells are words, with a picture of them


def test_there_is_an_end_to_them(page: ChatView, qtbot: QtBot) -> None:
    assert len(attach(page, qtbot, *[image()] * (MOST_PICTURES + 1))) == MOST_PICTURES
    assert page.notice_banner.text == f"A message takes up to {MOST_PICTURES} pictures."


def unsent(store: ChatStore) -> int:
    assert store.flush()
    with closing(sqlite3.connect(store.path)) as connection:
        return int(connection.execute("SELECT count(*) FROM unsent_pictures").fetchone()[0])


def test_unsent_ones_are_kept_until_they_are_sent_or_taken_away(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot
) -> None:
    first, second = attach(page, qtbot, image(), image(50, 50))
    page.composer.box.setPlainText("Which")
    assert unsent(store) == 2
    page.composer.pictures.buttons[0].click()
    assert unsent(store) == 1
    write(page, "Which?")
    assert page.presenter.model.pictures == (second,)
    assert unsent(store) == 0
    engine.finish()
    page.presenter.attach((first,))
    page.presenter.branch(page.presenter.model.rows[-1].message.id)
    assert page.presenter.pictures == ()
    page.new_chat()
    page.presenter.attach((first,))  # and no word
    alone = page.presenter.conversation.id
    page.new_chat()
    assert page.presenter.list_model.conversation(alone) is not None
    page.presenter.delete(alone)
    store._write(lambda database: database.purge(now=2.0**33))
    assert unsent(store) == 1


def test_unsent_ones_and_the_text_with_them_survive_a_kill(
    switchyard_home: Path, open_page: Callable[[], ChatView], qtbot: QtBot
) -> None:
    command, variables = python_module("tests.app.unsent_script")
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **variables}) as window:
        assert window.stdout.readline().strip() == b"kept"
        window.kill()
    page = open_page()
    page.presenter.step(0)
    qtbot.waitUntil(lambda: len(page.presenter.pictures) == 1)
    assert page.composer.text == "What is"
    assert page.presenter.conversation.model == "endpoint:Here/m"
    (place,) = places(page.composer.pictures)
    assert place.accessibleName() == "Picture 1 of 1, 30 by 20 pixels"
    assert page.composer.pictures.isVisible()
    page.composer.pictures.buttons[0].click()
    page.composer.box.setPlainText("")
    page.presenter.flush()
    again = open_page()
    again.presenter.step(0)
    qtbot.waitUntil(lambda: again.presenter.conversation.id == page.presenter.conversation.id)
    assert (again.presenter.pictures, again.composer.text) == ((), "")


def test_unsent_ones_stay_with_their_chat(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    write(page, "Hello")
    engine.finish()
    first = page.presenter.conversation.id
    attach(page, qtbot)
    page.new_chat()
    assert page.composer.pictures.isHidden()
    page.presenter.open(first)
    assert page.composer.pictures.isVisible()


def test_models_of_this_pc_say_that_they_read_text_only(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    attach(page, qtbot)
    write(page, "What is it?")
    engine.finish()
    page.presenter.choose_model("")
    assert "the pictures in this chat are not read" in page.sent_note.text()
    assert page.sent_note.isVisible()
    page.attaching.give([image()])
    assert page.notice_banner.text == "Starter reads text only. No model on this PC sees pictures."
    assert page.presenter.pictures == ()
    write(page, "And you?")
    assert not any(each.parts for each in engine.requests[1].command.messages)
    engine.finish()
    page.new_chat()
    assert page.sent_note.isHidden()


def test_a_model_that_refuses_them_is_sent_none_any_more(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    attach(page, qtbot)
    write(page, "What is it?")
    engine.fail(ErrorCode.PICTURES_NOT_READ, "Here reads no pictures with m: send the text alone.")
    assert page.presenter.model.rows[-1].message.reason.startswith("Here reads no pictures")
    assert page.sent_note.text().endswith("It reads text only: the pictures in this chat are not sent.")
    qtbot.waitUntil(lambda: saved_endpoints()[0].found.blind == ("m",))
    page.presenter.regenerate(page.presenter.model.rows[-1].message.id)  # the chat goes on
    assert [each.parts for each in engine.requests[1].command.messages] == [""]
    page.attaching.give([image()])
    assert page.notice_banner.text == "m of Here reads text only: choose another model to send pictures."
    page.presenter.choose_model("endpoint:Here/blind")
    assert page.presenter.reads_pictures  # nobody has said that of this one


def test_they_are_kept_with_the_chat_branched_exported_and_deleted_with_it(
    page: ChatView, engine: ScriptedEngine, store: ChatStore, qtbot: QtBot, tmp_path: Path
) -> None:
    def kept() -> int:
        assert store.flush()
        with closing(sqlite3.connect(store.path)) as connection:
            return int(connection.execute("SELECT count(*) FROM pictures").fetchone()[0])

    def loaded(conversation_id: str) -> Message:
        with qtbot.waitSignal(store.loaded) as heard:
            store.load(conversation_id)
        messages: tuple[Message, ...] = heard.args[1]
        return messages[0]

    pictures = attach(page, qtbot, image(), image(50, 50))
    write(page, "Which?")
    engine.reply("Both.")
    chat = page.presenter.conversation.id
    assert loaded(chat).pictures == pictures
    page.presenter.branch(page.presenter.model.rows[-1].message.id)
    assert loaded(page.presenter.conversation.id).pictures == pictures
    assert kept() == 4
    files = page.transfer.files
    for name in ("chat.json", "chat.md"):
        with qtbot.waitSignal(files.exported):
            page.transfer.export([chat], tmp_path / name)
        if name.endswith("json"):
            store.delete(chat)
        with qtbot.waitSignal(files.imported) as heard:
            page.transfer.import_files([tmp_path / name])
        again = loaded(heard.args[0].first.id)
        assert again.content == "Which?"
        assert again.pictures == (pictures if name.endswith("json") else ())
    assert "2 pictures, not in this file" in (tmp_path / "chat.md").read_text()
    assert kept() == 4
    store.delete(chat)
    store._write(lambda database: database.purge(now=2.0**33))
    assert kept() == 2


def test_a_damaged_file_of_chats_gives_them_back(tmp_path: Path, qtbot: QtBot) -> None:
    (small,), (large,) = prepared(qtbot, image()).pictures, prepared(qtbot, image(900, 900)).pictures
    path = tmp_path / "chats.sqlite3"
    database = open_checked(path)
    database.add_conversations([(Conversation("c"), ())])
    database.add_message(Message("q", "c", None, "user", "Which?", pictures=(large, small)))
    database.add_message(Message("a", "c", "q", "assistant", "Both."))
    database.close()
    database, recovery = recover(path)  # reads the pages alone
    assert (recovery.messages, recovery.lost) == (2, 0)
    assert [each.pictures for each in database.messages("c")] == [(large, small), ()]
    database.close()
