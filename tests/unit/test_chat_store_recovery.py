"""What survives a crash, a damaged file, a full disk and a second window."""

import errno
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.services.chat_store import store as store_module
from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.json_format import Whole
from app.services.chat_store.records import Conversation, Message, MessageState
from app.services.chat_store.recovery import Recovery, open_checked, recover
from app.services.chat_store.schema import is_damage
from app.services.chat_store.store import Job, StoreWorker, search
from app.services.chat_store.tree import MessageTree
from engine.common.errors import EngineError

CHATS = 12
TURNS = 20


def filled(path: Path) -> None:
    database = open_checked(path)
    for number in range(CHATS):
        conversation = Conversation(f"c{number}", f"Chat {number}", created_at=1.0, updated_at=float(number))
        tree = MessageTree()
        for turn in range(TURNS):
            parent = f"c{number}-{turn - 1}" if turn else None
            role = "assistant" if turn % 2 else "user"
            tree.add(Message(f"c{number}-{turn}", conversation.id, parent, role, f"word{number}x{turn} " * 60))
        database.add_conversations([(conversation, tree.messages())])
    database.close()


def read_out(path: Path) -> tuple[int, Recovery, ChatDatabase]:
    """(messages there now, what recovery said, the open database); the damaged file is untouched."""
    before = path.read_bytes()
    with pytest.raises(sqlite3.DatabaseError) as caught:
        open_checked(path).messages("c0")
    assert is_damage(caught.value)
    database, recovery = recover(path)
    assert recovery.kept_as.read_bytes() == before
    assert recovery.kept_as.name.startswith("chats.damaged-")
    count = database.connection.execute("SELECT count(*) FROM messages").fetchone()[0]
    assert count == recovery.messages
    assert database.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.connection.execute("INSERT INTO messages_fts (messages_fts, rank) VALUES ('integrity-check', 1)")
    return count, recovery, database


def test_one_damaged_page_costs_little(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    filled(path)
    page = 4096
    with closing(sqlite3.connect(path)) as connection:
        pages = connection.execute("SELECT pageno FROM dbstat WHERE name = 'messages' AND pagetype = 'leaf'").fetchall()
    data = bytearray(path.read_bytes())
    middle = pages[len(pages) // 2][0]
    data[(middle - 1) * page : middle * page] = os.urandom(page)
    path.write_bytes(data)
    count, recovery, database = read_out(path)
    assert recovery.conversations == CHATS
    assert CHATS * TURNS - 20 <= count < CHATS * TURNS
    assert search(database.connection, "word0x1")
    for number in range(CHATS):
        MessageTree(database.messages(f"c{number}"))
    database.close()


def test_a_truncated_file_gives_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    filled(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 // 4096 * 4096])
    count, _, database = read_out(path)
    assert count > 0
    database.close()


@pytest.mark.parametrize("lost", [16, 100, 4096])
def test_a_lost_beginning_costs_nothing_else(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "chats.sqlite3"
    filled(path)
    data = path.read_bytes()
    path.write_bytes(bytes(lost) + data[lost:])
    count, recovery, database = read_out(path)
    assert (recovery.conversations, count) == (CHATS, CHATS * TURNS)
    assert database.messages("c5")[-1].content.startswith("word5x19")
    database.close()


@pytest.mark.parametrize("data", [b"this was never a database" * 500, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_file_that_is_no_database_is_kept_and_replaced(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "chats.sqlite3"
    path.write_bytes(data)
    count, recovery, database = read_out(path)
    assert (count, recovery.conversations) == (0, 0)
    database.close()


def test_messages_without_their_conversation_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    filled(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM conversations WHERE id = 'c3'")
        connection.execute("DELETE FROM messages WHERE id = 'c4-7'")
    database, recovery = recover(path)
    assert recovery.conversations == CHATS
    assert recovery.messages == CHATS * TURNS - 1
    assert len(database.messages("c3")) == TURNS
    assert len(MessageTree(database.messages("c4"))) == TURNS - 1
    database.close()


def test_two_recoveries_in_a_second_keep_two_files(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    kept = set()
    for _ in range(2):
        path.write_bytes(b"damaged" * 1000)
        database, recovery = recover(path)
        database.close()
        kept.add(recovery.kept_as)
    assert len(kept) == 2
    assert all(file.exists() for file in kept)


WRITER = """
import sys
from pathlib import Path
from dataclasses import replace
from app.services.chat_store.records import Conversation, Message, MessageState
from app.services.chat_store.recovery import open_checked
database = open_checked(Path(sys.argv[1]))
database.add_conversations([(Conversation("c", "t", created_at=1.0, updated_at=1.0), ())])
database.add_message(Message("q", "c", None, "user", "question"))
answer = Message("a", "c", "q", "assistant", "", MessageState.STREAMING)
database.add_message(answer)
number = 0
while True:
    number += 1
    answer = replace(answer, content=answer.content + f"{number} ")
    database.save_step(answer)
    print(number, flush=True)
"""


def test_a_writer_killed_in_mid_answer_loses_no_step(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        told = 0
        while told < 200:
            told = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        told = max([told, *(int(line) for line in writer.stdout.read().split())])
    database = open_checked(path)
    assert database.end_interrupted("It was cut off.") == 1
    question, answer = database.messages("c")
    assert question.content == "question"
    assert answer.state is MessageState.PARTIAL
    steps = [int(word) for word in answer.content.split()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= told
    database.close()


class Told:
    """A worker on a file, and what it said."""

    def __init__(self, path: Path, *, retry_s: float = 0.01) -> None:
        self.troubles: list[Exception | None] = []
        self.recoveries: list[Recovery] = []
        self.newer = self.read_only = 0
        self.worker = StoreWorker(
            path,
            on_trouble=self.troubles.append,
            on_recovered=self.recoveries.append,
            on_newer=self._count,
            on_read_only=self._count_read_only,
            retry_s=retry_s,
        )

    def _count(self) -> None:
        self.newer += 1

    def _count_read_only(self) -> None:
        self.read_only += 1

    def write(self, run: Callable[[ChatDatabase], object]) -> None:
        self.worker.submit(Job(run))

    def read(self, run: Callable[[ChatDatabase], object]) -> list[object]:
        results: list[object] = []
        self.worker.submit(Job(run, results.append, writes=False))
        return results


@pytest.fixture
def open_worker(tmp_path: Path) -> Iterator[Callable[..., Told]]:
    opened: list[Told] = []

    def build(path: Path | None = None, **options: float) -> Told:
        opened.append(Told(path or tmp_path / "chats.sqlite3", **options))
        return opened[-1]

    yield build
    for told in opened:
        told.worker.close(10)


def hello(database: ChatDatabase) -> None:
    database.add_conversations([(Conversation("c", "hello", created_at=1.0, updated_at=1.0), ())])


def titles(database: ChatDatabase) -> list[str]:
    return [conversation.title for conversation in database.conversations()]


def test_a_full_disk_is_told_once_and_the_text_is_written_when_there_is_room(
    open_worker: Callable[..., Told], tmp_path: Path
) -> None:
    told = open_worker()
    told.write(hello)
    assert told.worker.flush(10)
    full = [True]

    def fill(database: ChatDatabase) -> None:
        pages = database.connection.execute("PRAGMA page_count").fetchone()[0]
        database.connection.execute(f"PRAGMA max_page_count = {pages if full[0] else 2**30}")

    def add(database: ChatDatabase) -> None:
        fill(database)
        database.add_message(Message("m", "c", None, "user", "long " * 5000))

    told.write(add)
    told.write(lambda database: database.change_conversation("c", {"title": "after"}))
    assert not told.worker.flush(0.2)
    # What only reads does not wait for the disk.
    seen = told.read(titles)
    while not seen:
        told.worker.flush(0.05)
    assert seen == [["hello"]]
    assert told.worker.unsaved() == 2
    assert len(told.troubles) == 1
    assert told.troubles[0] is not None
    assert getattr(told.troubles[0], "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
    full[0] = False
    assert told.worker.flush(10)
    assert told.troubles[1:] == [None]
    assert told.worker.close(10) == 0
    database = open_checked(tmp_path / "chats.sqlite3")
    assert titles(database) == ["after"]
    assert database.messages("c")[0].content == "long " * 5000
    database.close()


def test_closing_with_a_full_disk_says_what_is_not_saved(open_worker: Callable[..., Told]) -> None:
    told = open_worker(retry_s=60.0)

    def add(database: ChatDatabase) -> None:
        pages = database.connection.execute("PRAGMA page_count").fetchone()[0]
        database.connection.execute(f"PRAGMA max_page_count = {pages}")
        database.add_conversations([(Conversation("c", "t"), [Message("m", "c", None, "user", "long " * 50_000)])])

    told.write(add)
    told.worker.flush(0.2)
    assert told.worker.close(10) == 1


def test_a_folder_that_cannot_be_used_is_told_and_used_once_it_can(
    open_worker: Callable[..., Told], tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    told = open_worker(blocked / "chats.sqlite3")
    told.write(hello)
    assert not told.worker.flush(0.2)
    assert len(told.troubles) == 1
    blocked.unlink()
    assert told.worker.flush(10)
    assert told.troubles[1:] == [None]


def test_a_recovery_without_room_changes_nothing_and_is_tried_again(
    open_worker: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.sqlite3"
    filled(path)
    damaged = bytes(4096) + path.read_bytes()[4096:]
    path.write_bytes(damaged)
    full = [True]
    add = ChatDatabase.add_conversations

    def refuse(database: ChatDatabase, whole: Iterable[Whole]) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(database, whole)

    monkeypatch.setattr(ChatDatabase, "add_conversations", refuse)
    told = open_worker()
    told.write(hello)
    while not told.troubles:
        told.worker.flush(0.05)
    assert path.read_bytes() == damaged
    assert [type(error) for error in told.troubles] == [OSError]
    full[0] = False
    assert told.worker.flush(10)
    seen = told.read(titles)
    assert told.worker.flush(10)
    assert len(seen[0]) == CHATS + 1  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("switchyard-rec")] == []


def test_a_fault_of_ours_does_not_end_the_thread(open_worker: Callable[..., Told]) -> None:
    told = open_worker()
    failures: list[EngineError] = []

    def broken(_: ChatDatabase) -> None:
        raise ZeroDivisionError

    told.worker.submit(Job(broken, failed=failures.append))
    told.write(hello)
    seen = told.read(titles)
    assert told.worker.flush(10)
    assert seen == [["hello"]]
    assert len(failures) == 1


def test_two_windows_on_one_file_take_turns(open_worker: Callable[..., Told]) -> None:
    first, second = open_worker(), open_worker()
    first.write(hello)
    assert first.worker.flush(10)
    for number in range(40):
        for name, told in (("one", first), ("two", second)):
            message = Message(f"{name}-{number}", "c", None, "user", "x")
            told.write(lambda database, message=message: database.add_message(message))
    assert first.worker.flush(30)
    assert second.worker.flush(30)
    seen = first.read(lambda database: database.messages("c"))
    assert first.worker.flush(10)
    (messages,) = seen
    assert isinstance(messages, tuple)
    assert len(messages) == 80
    assert sum(message.chosen for message in messages) == 1
    assert first.recoveries == second.recoveries == []


def test_a_step_that_waits_is_replaced_by_a_newer_one(open_worker: Callable[..., Told]) -> None:
    told = open_worker()
    ran: list[int] = []

    def wait(_: ChatDatabase) -> None:
        told.worker.submit(Job(lambda _: ran.append(1), replaces="m"))
        told.worker.submit(Job(lambda _: ran.append(2), replaces="other"))
        told.worker.submit(Job(lambda _: ran.append(3), replaces="m"))

    told.write(wait)
    assert told.worker.flush(10)
    assert ran == [3, 2]


@pytest.fixture
def read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a filled database that this process may only read."""
    folder = tmp_path / "read-only"
    filled(folder / "chats.sqlite3")
    folder.chmod(0o555)
    (folder / "chats.sqlite3").chmod(0o444)
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # modes do not bind root
        monkeypatch.setattr(store_module, "can_be_written", lambda _path: False)
    yield folder
    folder.chmod(0o755)


@pytest.mark.skipif(sys.platform == "win32", reason="there a folder cannot be made read-only")
@pytest.mark.parametrize("damage", [False, True])
def test_a_read_only_folder_lists_its_chats_and_says_that_nothing_is_kept(
    open_worker: Callable[..., Told], read_only_folder: Path, damage: bool
) -> None:
    path = read_only_folder / "chats.sqlite3"
    if damage:
        path.chmod(0o644)
        path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
        path.chmod(0o444)
    before = path.read_bytes()
    told = open_worker(path)
    told.write(hello)
    seen = told.read(titles)
    assert told.worker.flush(30)
    assert len(seen[0]) == CHATS + 1  # type: ignore[arg-type]
    assert (told.read_only, told.troubles) == (1, [])
    assert [recovery.kept_as for recovery in told.recoveries] == [path] * damage
    told.worker.close(10)
    assert path.read_bytes() == before
    assert os.listdir(read_only_folder) == ["chats.sqlite3"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_the_database_and_its_log_are_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "data" / "chats.sqlite3"
    path.parent.mkdir()
    database = open_checked(path)
    hello(database)
    database.close()
    aside = path.with_name("chats.damaged-2026-01-01-000000.sqlite3")
    aside.touch()
    for file in (path, aside):  # as the first version made them
        file.chmod(0o644)
    path.parent.chmod(0o755)
    database = open_checked(path)
    database.change_conversation("c", {"title": "new"})
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    database.close()
    assert set(modes.values()) == {0o600}
    assert len(modes) == 4
    assert path.parent.stat().st_mode & 0o777 == 0o700
