"""The store as the window sees it: answers by signals, and one clear sentence when something is wrong."""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from PySide6.QtCore import QThread
from pytestqt.qtbot import QtBot

from app.services.chat_store import ChatStore, Conversation, Message, MessageState
from app.services.chat_store.database import ChatDatabase
from engine.common.kept_context import folder_of, keep_chat, kept_context_dir, kept_files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.sqlite3"


@pytest.fixture
def open_store(qtbot: QtBot, path: Path) -> Iterator[Callable[[], ChatStore]]:
    opened: list[ChatStore] = []

    def build() -> ChatStore:
        opened.append(ChatStore(path, retry_s=0.01))
        return opened[-1]

    yield build
    for store in opened:
        store.close()


def test_answers_come_on_the_windows_thread(open_store: Callable[[], ChatStore], qtbot: QtBot) -> None:
    store = open_store()
    threads: list[QThread] = []
    store.listed.connect(lambda _: threads.append(QThread.currentThread()))
    store.create(Conversation("c", "t"))
    with qtbot.waitSignal(store.listed) as listed:
        store.list_conversations()
    assert [conversation.title for conversation in listed.args[0]] == ["t"]
    assert threads == [store.thread()]
    with qtbot.waitSignal(store.missing) as missing:
        store.load("nowhere")
    assert missing.args == ["nowhere"]


def test_what_a_crash_cut_off_is_marked_at_the_next_start(open_store: Callable[[], ChatStore], qtbot: QtBot) -> None:
    first = open_store()
    first.create(Conversation("c", "t"), [Message("q", "c", None, "user", "?")])
    first.add_message(Message("a", "c", "q", "assistant", "so far", MessageState.STREAMING))
    first.close()
    second = open_store()
    with qtbot.waitSignal(second.loaded) as loaded:
        second.load("c")
    answer = loaded.args[1][1]
    assert (answer.content, answer.state, answer.reason_code) == ("so far", MessageState.PARTIAL, "interrupted")
    assert answer.reason.endswith(".")


def test_a_recovery_is_told_with_figures_and_the_files_place(
    open_store: Callable[[], ChatStore], path: Path, qtbot: QtBot
) -> None:
    first = open_store()
    first.create(Conversation("c", "t"), [Message("q", "c", None, "user", "?")])
    first.close()
    data = path.read_bytes()
    path.write_bytes(bytes(100) + data[100:])
    store = open_store()
    with qtbot.waitSignal(store.notice) as notice:
        store.list_conversations()
    assert "chats: 1, messages: 1" in notice.args[0]
    assert "chats.damaged-" in notice.args[0]
    with qtbot.waitSignal(store.loaded) as loaded:
        store.load("c")
    assert loaded.args[1][0].content == "?"


def test_a_newer_file_is_told(open_store: Callable[[], ChatStore], path: Path, qtbot: QtBot) -> None:
    open_store().close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    keep_chat("one of its chats")
    (folder_of("one of its chats", kept_context_dir()) / f"{'0' * 32}.kept").write_bytes(b"what was read")
    before = path.read_bytes()
    store = open_store()
    notices: list[str] = []
    store.notice.connect(notices.append)
    store.create(Conversation("c", "hello"))
    with qtbot.waitSignal(store.listed) as listed:
        store.list_conversations()
    qtbot.waitUntil(lambda: bool(notices))
    assert "newer Switchyard" in notices[0]
    assert [conversation.title for conversation in listed.args[0]] == ["hello"]
    store.close()
    assert path.read_bytes() == before
    assert kept_files(kept_context_dir())


def _error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("refused")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_error(sqlite3.SQLITE_FULL), "disk is full"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "disk is full"),
        (_error(sqlite3.SQLITE_BUSY), "Another program"),
        (_error(sqlite3.SQLITE_READONLY), "cannot be saved"),
    ],
)
def test_each_trouble_is_one_sentence_and_is_taken_back(
    open_store: Callable[[], ChatStore], qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    store = open_store()
    store.create(Conversation("c", "t"))
    assert store.flush()
    refused = [True]
    choose = ChatDatabase.choose

    def refuse(database: ChatDatabase, message_id: str) -> None:
        if refused[0]:
            raise error
        choose(database, message_id)

    monkeypatch.setattr(ChatDatabase, "choose", refuse)
    told: list[str] = []
    store.trouble.connect(told.append)
    store.choose("m")
    qtbot.waitUntil(lambda: bool(told))
    assert words in told[0]
    assert told[0].endswith(".")
    assert store.unsaved == 1
    refused[0] = False
    qtbot.waitUntil(lambda: len(told) == 2)
    assert told[1] == ""
    assert store.unsaved == 0


def test_deleting_a_chat_removes_what_was_computed_of_it(open_store: Callable[[], ChatStore]) -> None:
    """No engine runs."""
    store = open_store()
    assert store.flush(10)
    for chat in ("a", "b", "c"):
        store.create(Conversation(chat, "t"))
        keep_chat(chat)
        (folder_of(chat, kept_context_dir()) / f"{'0' * 32}.kept").write_bytes(b"what was read")
    keep_chat("one that a crash has lost")
    store.delete("b")
    assert store.flush(10)
    assert not folder_of("b", kept_context_dir()).exists()
    assert len(kept_files(kept_context_dir())) == 2
    store.restore("b")
    store.delete("c")
    keep_chat("c")  # as if it could not be removed then
    store.close()
    open_store().flush(10)
    there = {path.name for path in kept_context_dir().iterdir() if path.is_dir()}
    assert there == {folder_of("a", kept_context_dir()).name}
