"""One wrong bit anywhere in the chat database costs at most what is on its page."""

import random
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.pages import PAGE_BYTES, Pages
from app.services.chat_store.records import AnswerStats, Conversation, Message, MessageState
from app.services.chat_store.recovery import Recovery, open_checked, recover
from app.services.chat_store.schema import is_damage
from app.services.chat_store.store import search
from app.services.chat_store.tree import MessageTree

CHATS, TURNS = 20, 20
SECRET = "said in a chat that was deleted"


@dataclass(frozen=True)
class Store:
    """A sound database file: its bytes, its messages by id, the pages of each, and what is where."""

    data: bytes
    messages: dict[str, Message]
    pages_of: dict[str, set[int]]
    kinds: dict[int, tuple[str, str]]

    def pages(self, name: str, kind: str) -> list[int]:
        return sorted(page for page, found in self.kinds.items() if found == (name, kind))


def made_up_id(source: random.Random) -> str:
    return f"{source.getrandbits(128):032x}"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """400 messages in 20 chats, some of several pages, a chat that was removed for good and one that will be."""
    path = tmp_path_factory.mktemp("store") / "chats.sqlite3"
    source = random.Random(5)
    words = [f"word{number}" for number in range(800)]
    database = open_checked(path)
    messages: dict[str, Message] = {}
    for chat in range(CHATS + 2):
        conversation = Conversation(made_up_id(source), f"Chat {chat}", created_at=1.7e9, updated_at=1.7e9 + chat)
        tree = MessageTree()
        for turn in range(TURNS):
            text = " ".join(source.choices(words, k=source.choice([5, 20, 60, 1200 if turn % 7 == 0 else 120])))
            message = Message(
                made_up_id(source),
                conversation.id,
                tree.leaf_id(),
                "assistant" if turn % 2 else "user",
                text if chat < CHATS else SECRET * 20,
                model="starter",
                created_at=1.7e9 + turn / 10,
                stats=AnswerStats("stop", 5, 6, 0.5, 9.5) if turn % 2 else None,
            )
            tree.add(message)
            if chat < CHATS:
                messages[message.id] = message
        database.add_conversations([(conversation, tree.messages())])
        if chat == CHATS:
            database.set_deleted(conversation.id, 1.0)
            assert database.purge() == 1
        elif chat > CHATS:
            database.set_deleted(conversation.id, 2e9)
    database.close()
    with closing(sqlite3.connect(path)) as connection:
        kinds = {
            page: (name, kind) for page, name, kind in connection.execute("SELECT pageno, name, pagetype FROM dbstat")
        }
    data = path.read_bytes()
    overflow = {page for page, (_, kind) in kinds.items() if kind == "overflow"}
    pages_of = {message.id: _pages_of(data, message, overflow) for message in messages.values()}
    return Store(data, messages, pages_of, kinds)


def _pages_of(data: bytes, message: Message, overflow: set[int]) -> set[int]:
    """The pages that a message lies on."""
    text = message.content.encode()
    found = {data.find(text[at : at + 30]) // PAGE_BYTES + 1 for at in range(0, len(text), 100)} - {0}
    following = (int.from_bytes(data[(page - 1) * PAGE_BYTES :][:4], "big") for page in found & overflow)
    return found | {page for page in following if page}


def read_all(database: ChatDatabase) -> dict[str, Message]:
    found: dict[str, Message] = {}
    for conversation in database.conversations():
        found.update({message.id: message for message in MessageTree(database.messages(conversation.id)).messages()})
    return found


def use(database: ChatDatabase) -> dict[str, Message]:
    """Reads, searches and writes as a window does; the messages that were there."""
    found = read_all(database)
    search(database.connection, "word3")
    database.add_conversations([(Conversation("new"), ())])
    database.add_message(Message("new", "new", None, "user", "and on it goes"))
    return found


def opened(path: Path) -> tuple[dict[str, Message], Recovery | None]:
    """What a window finds in a file that may be damaged, and what recovery said if there was one."""
    recovery = database = None
    try:
        database = open_checked(path)
        found = use(database)
    except sqlite3.Error as error:
        if database is not None:
            database.close()
        if not is_damage(error):
            raise
        database, recovery = recover(path)
        found = use(database)
    database.close()
    return found, recovery


def check_flips(store: Store, bits: list[int], folder: Path) -> list[str]:
    """What is wrong after each of these bits was flipped alone; empty if nothing is."""
    wrong: list[str] = []
    for bit in bits:
        path = folder / "flipped" / "chats.sqlite3"
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        data = bytearray(store.data)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        page = bit // 8 // PAGE_BYTES + 1
        found, recovery = opened(path)
        where = f"bit {bit} on page {page} ({store.kinds.get(page)})"
        for id_, message in store.messages.items():
            if page not in store.pages_of[id_]:
                other = found.get(id_)
                if other is None or (other.content, other.role) != (message.content, message.role):
                    wrong.append(f"{where}: message {id_} is lost or another")
        if any(SECRET in message.content for message in found.values()):
            wrong.append(f"{where}: a deleted chat came back")
        if recovery is None:
            continue
        if recovery.kept_as.read_bytes() != data:
            wrong.append(f"{where}: the damaged file was changed")
        if (recovery.messages, recovery.lost) != (len(found), len(store.messages) - len(found)):
            wrong.append(f"{where}: {recovery} of {len(found)} messages")
    return wrong


def test_a_sample_of_bits(store: Store, tmp_path: Path) -> None:
    assert check_flips(store, random.Random(1).sample(range(len(store.data) * 8), 12), tmp_path) == []


def test_bits_where_they_hurt(store: Store, tmp_path: Path) -> None:
    """In the file's header, the schema, the pages that only lead to others, and the headers of pages."""
    source = random.Random(2)
    schema = store.pages("sqlite_schema", "leaf")
    leads = [1, *store.pages("messages", "internal"), *store.pages("messages_by_parent", "internal")]
    pages = [*source.sample(schema, 2), *leads, *source.sample(store.pages("messages", "leaf"), 2)]
    bits = [((page - 1) * PAGE_BYTES + source.randrange(64)) * 8 + source.randrange(8) for page in pages]
    bits += [((page - 1) * PAGE_BYTES + source.randrange(PAGE_BYTES)) * 8 for page in schema]
    assert check_flips(store, bits, tmp_path) == []


def test_a_row_id_that_becomes_that_of_another_row(store: Store, tmp_path: Path) -> None:
    first = next(page for page in store.pages("messages", "leaf") if _row_id_at(store, page, 0) is not None)
    places = [_row_id_at(store, first, cell) for cell in range(3)]
    assert (
        check_flips(store, [place * 8 + bit for place in places if place is not None for bit in (0, 3)], tmp_path) == []
    )


def test_a_message_of_a_deleted_chat_stays_deleted_whatever_it_says_of_its_chat(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "sound.sqlite3"
    source.write_bytes(store.data)
    with closing(sqlite3.connect(source)) as connection:
        asked = "SELECT id, conversation_id FROM messages WHERE content LIKE ?"
        rows = connection.execute(asked, (f"%{SECRET}%",)).fetchall()
    assert rows
    # In a row of the table, unlike in one of an index, both ids stand beside each other.
    places = [store.data.find(f"{id_}{conversation}".encode()) + len(id_) for id_, conversation in rows[:2]]
    assert min(places) > 100
    bits = [(place + at) * 8 + bit for place in places for at, bit in ((0, 0), (9, 1), (31, 6))]
    assert check_flips(store, bits, tmp_path) == []


def _row_id_at(store: Store, page: int, cell: int) -> int | None:
    """Where a cell of a table's leaf says its row's id, if that takes one byte (SQLite's file format, 1.6)."""
    start = (page - 1) * PAGE_BYTES
    at = start + int.from_bytes(store.data[start + 8 + 2 * cell :][:2], "big")
    while store.data[at] >= 0x80:  # the length of the payload comes before it
        at += 1
    return at + 1 if store.data[at + 1] < 0x80 else None


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_five_thousand_bits(store: Store, tmp_path: Path) -> None:
    assert check_flips(store, random.Random(3).sample(range(len(store.data) * 8), 5000), tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_bit_of_the_header_and_of_the_first_bytes_of_pages(store: Store, tmp_path: Path) -> None:
    starts = [0, *((page - 1) * PAGE_BYTES for page in store.pages("messages", "internal"))]
    bits = [start * 8 + bit for start in starts for bit in range(112 * 8)]
    assert check_flips(store, bits, tmp_path) == []


@pytest.mark.parametrize("column", ["content", "model", "id", "parent_id", "conversation_id"])
def test_a_byte_that_is_not_utf8_costs_itself(store: Store, tmp_path: Path, column: str) -> None:
    path = tmp_path / "chats.sqlite3"
    path.write_bytes(store.data)
    id_, message = list(store.messages.items())[30]
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER messages_change")
        sql = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'messages'").fetchone()[0]
        assert column in sql
        connection.execute(
            f"UPDATE messages SET {column} = CAST(x'FF' || substr(CAST({column} AS BLOB), 2) AS TEXT) WHERE id = ?",
            (id_,),
        )
    found, _ = opened(path)
    assert len(found) == len(store.messages)
    kept = [other for other in found.values() if other.content[1:] == message.content[1:]]
    assert len(kept) == 1
    assert kept[0].conversation_id == message.conversation_id


def test_what_is_only_in_the_log_is_read(tmp_path: Path) -> None:
    path, copy = tmp_path / "chats.sqlite3", tmp_path / "copy" / "chats.sqlite3"
    copy.parent.mkdir()
    database = open_checked(path)
    tree = MessageTree()
    for turn in range(50):
        tree.add(Message(f"m{turn}", "c", tree.leaf_id(), "user", f"text {turn} " * 100))
    database.add_conversations([(Conversation("c", "Chat"), tree.messages())])
    for suffix in ("", "-wal"):
        shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    database.close()
    log = bytearray(Path(f"{copy}-wal").read_bytes())
    assert len(log) > 10 * PAGE_BYTES
    copy.write_bytes(b"damaged!" + copy.read_bytes()[8:])
    found, recovery = opened(copy)
    assert recovery is not None
    assert {message.content for message in found.values()} == {f"text {turn} " * 100 for turn in range(50)}


def test_a_transaction_that_was_not_finished_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    database = open_checked(path)
    database.add_conversations([(Conversation("c", "Chat"), ())])
    for number in range(2):
        database.add_message(Message(f"m{number}", "c", None, "user", "text"))
    log = Path(f"{path}-wal").read_bytes()
    rows = len(list(Pages(path).rows(lambda values: len(values) == 15)))
    Path(tmp_path / "cut.sqlite3").write_bytes(path.read_bytes())
    Path(tmp_path / "cut.sqlite3-wal").write_bytes(log[:-1])
    cut = len(list(Pages(tmp_path / "cut.sqlite3").rows(lambda values: len(values) == 15)))
    database.close()
    assert (rows, cut) == (2, 1)


def test_a_long_message_is_kept_up_to_its_damaged_page(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    id_ = max(store.messages, key=lambda each: len(store.pages_of[each]))
    page = sorted(store.pages_of[id_] & set(store.pages("messages", "overflow")))[0]
    data = bytearray(store.data)
    data[(page - 1) * PAGE_BYTES : (page - 1) * PAGE_BYTES + 4] = b"\xff" * 4
    path.write_bytes(data)
    found, recovery = opened(path)
    assert (recovery.lost, len(found)) == (0, len(store.messages))
    kept = found[id_]
    assert store.messages[id_].content.startswith(kept.content)
    assert len(kept.content) > PAGE_BYTES
    assert (kept.state, kept.reason_code) == (MessageState.PARTIAL, "damaged")


def test_a_row_whose_place_is_damaged_is_found_on_its_page(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    page = store.pages("messages", "leaf")[3]
    data = bytearray(store.data)
    start = (page - 1) * PAGE_BYTES
    data[start + 8 : start + 10] = b"\x00\x10"  # where its first cell begins
    path.write_bytes(data)
    found, recovery = opened(path)
    assert (recovery.lost, len(found)) == (0, len(store.messages))


def test_lost_messages_are_counted_and_leave_one_piece(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    page = store.pages("messages", "leaf")[5]
    data = bytearray(store.data)
    data[(page - 1) * PAGE_BYTES : page * PAGE_BYTES] = bytes(PAGE_BYTES)
    path.write_bytes(data)
    database, recovery = recover(path)
    lost = {id_ for id_, pages in store.pages_of.items() if page in pages}
    assert lost
    assert recovery.lost == len(lost)
    for conversation in database.conversations():
        tree = MessageTree(database.messages(conversation.id))
        assert len(tree.path()) == len(tree)
    database.close()
