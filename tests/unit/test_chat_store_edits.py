"""The message tree and edits of it: whatever the order, nothing is lost, and what is sent is what is shown."""

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.services.answer_queue import NOT_SENT, instructions_with, prompt_of
from app.services.chat_store.database import PURGE_AFTER_S, ChatDatabase
from app.services.chat_store.json_format import Merged, from_json, merge, to_export, to_json
from app.services.chat_store.reading import Unread, read_chats
from app.services.chat_store.records import Conversation, Fold, Folder, Message, digest_of
from app.services.chat_store.recovery import open_checked, recover
from app.services.chat_store.schema import MIGRATIONS, connect, migrate
from app.services.chat_store.store import search
from app.services.chat_store.tree import MessageTree, sound, without_deleted

CHAT = Conversation("c", "a title", created_at=1.0, updated_at=1.0)


def message(id_: str, parent: str | None, role: str = "user", **more: object) -> Message:
    return Message(id_, "c", parent, role, f"text of {id_}", created_at=1.0, **more)  # type: ignore[arg-type]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[ChatDatabase]:
    with closing(open_checked(tmp_path / "chats.sqlite3")) as opened:
        yield opened


def check(tree: MessageTree, said: dict[str, str]) -> None:
    """Every message is still there, and each that is not deleted can be reached by stepping through versions."""
    everything = tree.messages()
    assert {m.id: m.content for m in everything} == said
    path = tree.path()
    assert not any(m.deleted_at for m in path)
    for m in everything:
        if m.deleted_at:
            continue
        number, versions = tree.versions(m.id)
        assert 1 <= number <= versions
        for offset in (-1, 1):
            other = tree.sibling(m.id, offset)
            assert (other is None) == (not 1 <= number + offset <= versions)
            if other is not None:
                assert tree.sibling(other, -offset) == m.id
    # The path ends only where nothing follows: else what follows could not be reached.
    end = path[-1].id if path else None
    assert not [m for m in everything if not m.deleted_at and [e.id for e in tree.lineage(m.id)][:-1][-1:] == [end]]
    at, earlier, later = tree.folded()
    assert [*earlier, *later] == path
    assert at is not None or not earlier


@settings(max_examples=75, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aaadrcfue"), st.integers(0, 10**6)), max_size=45))
def test_any_sequence_keeps_everything_in_memory_and_on_disk(moves: list[tuple[str, int]]) -> None:
    with closing(connect(Path(":memory:"))) as connection:
        migrate(connection)
        database, tree = ChatDatabase(connection), MessageTree()
        database.add_conversations([(CHAT, ())])
        said: dict[str, str] = {}
        for step, (kind, number) in enumerate(moves):
            living = [m.id for m in tree.messages() if not m.deleted_at]
            gone = [m.id for m in tree.messages() if m.deleted_at]
            if kind == "a" or not living:
                parent = ([None, *living])[number % (len(living) + 1)]
                new = message(f"m{step}", parent, ("user", "assistant")[number % 2])
                tree.add(new)
                database.add_message(new)
                said[new.id] = new.content
            elif kind == "d":
                id_ = living[number % len(living)]
                for node in tree.delete(id_, 5.0):
                    database.choose(node)
                database.set_message_deleted(id_, 5.0)
            elif kind == "r" and gone:
                id_ = gone[number % len(gone)]
                chosen = tree.restore(id_)
                database.set_message_deleted(id_, None)
                for node in chosen:
                    database.choose(node)
                assert id_ in [m.id for m in tree.lineage(id_)]
            elif kind == "c":
                for node in tree.choose(living[number % len(living)]):
                    database.choose(node)
            elif kind in "fu":
                id_ = living[number % len(living)]
                fold = Fold("in short", kind == "f", 6.0, "model", digest_of(tree.lineage(id_)))
                tree.set_fold(id_, fold)
                database.set_fold(id_, fold)
            elif kind == "e":
                id_ = living[number % len(living)]
                copies = [replace(tree[id_], id=f"e{step}", content="edited", chosen=True)]
                for node in tree.nodes_after(id_):
                    copies.append(replace(node, id=f"{node.id}+{step}", parent_id=copies[-1].id, chosen=True))
                for copy in copies:
                    tree.add(copy)
                    said[copy.id] = copy.content
                database.add_messages(copies)
                if number % 2:
                    assert tree.remove([copy.id for copy in copies])
                    database.remove_messages([copy.id for copy in copies])
                    for node in tree.choose(id_):
                        database.choose(node)
                    for copy in copies:
                        del said[copy.id]
            check(tree, said)
        again = MessageTree(database.messages("c"))
        assert [m.id for m in again.path()] == [m.id for m in tree.path()]
        assert [replace(m, chosen=True) for m in again.messages()] == [replace(m, chosen=True) for m in tree.messages()]
        sent, shown = again.folded(), tree.folded()
        assert [m.id for m in sent[2]] == [m.id for m in shown[2]]
        ((_, read),) = from_json(json.loads(to_json([(CHAT, database.messages("c"))])))[0]
        assert [m.id for m in MessageTree(read).path()] == [m.id for m in tree.path()]
        exported = MessageTree(without_deleted(database.messages("c")))
        assert [m.id for m in exported.path()] == [m.id for m in tree.path()]
        assert not any(m.content for m in exported.messages() if m.deleted_at)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_a_deleted_message_is_not_found_and_purged_later_but_what_follows_stays(database: ChatDatabase) -> None:
    chain = [message("q", None), message("walrus", "q", "assistant"), message("p", "walrus"), message("b", "p")]
    database.add_conversations([(CHAT, chain)])
    for id_ in ("walrus", "b"):
        database.set_message_deleted(id_, 1000.0)
    assert search(database.connection, "walrus") == ()
    assert search(database.connection, "text of walrus 中") == ()
    database.purge(1000.0 + PURGE_AFTER_S - 1)
    assert len(database.messages("c")) == 4
    database.purge(1000.0 + PURGE_AFTER_S + 1)
    left = {m.id: m.content for m in database.messages("c")}
    assert left == {"q": "text of q", "walrus": "", "p": "text of p"}
    assert [m.id for m in MessageTree(database.messages("c")).path()] == ["q", "p"]


def test_what_is_sent_is_the_summary_and_the_later_turns() -> None:
    turns = [message("q", None), message("a", "q", "assistant"), message("p", "a"), message("b", "p", "assistant")]
    tree = MessageTree(turns)
    tree.set_fold("a", Fold("They greeted."))
    at, earlier, later = tree.folded("p")
    assert [m.id for m in earlier] == ["q", "a"]
    sent = prompt_of(instructions_with("Be brief.", at.fold), later)
    assert [turn.role for turn in sent] == ["system", "user"]
    assert sent[0].content.startswith("Be brief.\n\n")
    assert sent[0].content.endswith("They greeted.")
    tree.set_fold("a", Fold(""))
    assert instructions_with("", tree["a"].fold) == ""
    other = message("a2", "q", "assistant")
    tree.add(other)  # another version of what is folded: the fold is not on its path
    assert tree.folded("a2")[0] is None
    tree.delete("q", 2.0)
    assert [turn.content for turn in prompt_of("", tree.folded("a2")[2])] == [NOT_SENT, "text of a2"]


def put(database: ChatDatabase, path: Path) -> Merged:
    """Imports a file at once."""
    folders: list[Folder] = []
    return merge(database, read_chats([path], Unread(), lambda _share: None, lambda: False, folders), folders)


def test_what_was_deleted_since_an_export_stays_so_and_does_not_double_the_chat(
    database: ChatDatabase, tmp_path: Path
) -> None:
    database.add_conversations([(CHAT, [message("q", None), message("a", "q", "assistant"), message("p", "a")])])
    before = tmp_path / "before.json"
    before.write_text(to_json([(CHAT, to_export(database, "c"))]), "utf-8")
    database.set_message_deleted("q", 5.0)
    after = tmp_path / "after.json"
    after.write_text(to_json([(CHAT, to_export(database, "c"))]), "utf-8")
    for file in (before, after):
        assert put(database, file).known == (CHAT,)
    assert [m.id for m in MessageTree(database.messages("c")).path()] == ["a", "p"]


def test_folds_folders_and_deletions_survive_export_and_import(database: ChatDatabase, tmp_path: Path) -> None:
    fold = Fold("In short: hello.", True, 3.0, "Starter", "d")
    chain = [message("q", None), message("a", "q", "assistant", fold=fold), message("p", "a")]
    folder = Folder("f", "Work", False, 2.0)
    database.put_folder(folder)
    database.add_conversations([(replace(CHAT, folder_id="f"), chain)])
    database.set_message_deleted("q", 5.0)
    file = tmp_path / "chats.json"
    conversation = database.conversation("c")
    assert conversation is not None
    file.write_text(to_json([(conversation, to_export(database, "c"))], database.folders()), "utf-8")
    assert "text of q" not in file.read_text("utf-8")
    with closing(open_checked(tmp_path / "other.sqlite3")) as other:
        (there,) = put(other, file).added
        assert other.folders() == (folder,)
        assert there.folder_id == "f"
        assert other.messages("c")[1].fold == fold
        assert [m.id for m in MessageTree(other.messages("c")).path()] == ["a", "p"]
        other.update_message(replace(other.messages("c")[2], content="edited since"))
        (again,) = put(other, file).added  # beside what was changed
        assert (again.folder_id, len(other.folders())) == ("f", 1)
        assert other.messages(again.id)[1].fold == fold
        assert put(other, file).known == (again,)
        other.remove_folder("f")
        assert other.conversation("c") == replace(there, folder_id="")
        assert (put(other, file).folders, other.folders()) == ((), ())  # nothing new lies in it
        other.put_folder(Folder("g", "Work"))
        other.set_deleted(again.id, 9.0)
        (third,) = put(other, file).added
        assert third.folder_id == "g"  # the folder of that name


@pytest.mark.parametrize(
    "folders",
    [
        "x",
        [1],
        [{"id": 3, "name": "a"}],
        [{"id": "a"}],
        [{"id": "a", "name": " "}],
        [{"id": "a", "name": "b", "created_at": "x"}],
    ],
)
def test_odd_folders_in_a_file_are_left_out(database: ChatDatabase, tmp_path: Path, folders: object) -> None:
    import json

    raw = json.loads(to_json([(replace(CHAT, folder_id="a"), [message("q", None)])]))
    raw["folders"] = folders
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(raw), "utf-8")
    (read,) = put(database, file).added
    assert (read.folder_id, database.folders()) == ("", ())


def test_a_damaged_file_gives_its_folds_and_folders_back(tmp_path: Path) -> None:
    path, source = tmp_path / "chats.sqlite3", random.Random(3)
    database = open_checked(path)
    ids = [f"{source.getrandbits(128):032x}" for _ in range(4)]
    fold = Fold("In short.", True, 3.0, "Starter", "d")
    chain = [
        Message(ids[0], ids[3], None, "user", "one", created_at=1.0),
        Message(ids[1], ids[3], ids[0], "assistant", "two", created_at=2.0, fold=fold),
        Message(ids[2], ids[3], ids[1], "user", "three", created_at=3.0),
    ]
    database.put_folder(Folder("f" * 32, "Work"))
    database.add_conversations([(Conversation(ids[3], "kept", False, 1.0, 2.0, folder_id="f" * 32), chain)])
    database.set_message_deleted(ids[0], 4.0)
    database.close()
    again, recovery = recover(path)
    try:
        assert recovery.messages == 3
        (kept,) = again.conversations()
        assert (kept.title, kept.folder_id, [f.name for f in again.folders()]) == ("kept", "f" * 32, ["Work"])
        messages = again.messages(ids[3])
        assert (messages[1].fold, messages[0].deleted_at) == (fold, 4.0)
    finally:
        again.close()


def test_a_file_of_the_version_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    with closing(connect(path)) as connection:
        migrate(connection, MIGRATIONS[:5])
        connection.execute("INSERT INTO conversations (id, title, created_at, updated_at) VALUES ('c', 'old', 1, 2)")
    database = open_checked(path)
    assert [(c.title, c.folder_id) for c in database.conversations()] == [("old", "")]
    with pytest.raises(sqlite3.IntegrityError):
        database.connection.execute("INSERT INTO folds VALUES (1, 'nowhere', '', 1, 0, '', '')")
    database.close()


def tree_message(id_: str, parent: str | None, *, chosen: bool = True) -> Message:
    return Message(id_, "c", parent, "user", f"text {id_}", chosen=chosen)


# A growing tree: each step adds a child under one of the earlier messages, or chooses a message.
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=40)


def grown(moves: list[tuple[bool, int]]) -> MessageTree:
    tree, ids = MessageTree(), []
    for adds, number in moves:
        if adds or not ids:
            parent = ([None, *ids])[number % (len(ids) + 1)]
            ids.append(f"m{len(ids)}")
            tree.add(tree_message(ids[-1], parent))
        else:
            tree.choose(ids[number % len(ids)])
    return tree


def check_invariants(tree: MessageTree) -> None:
    messages = tree.messages()
    groups: dict[str | None, list[Message]] = {}
    for m in messages:
        groups.setdefault(m.parent_id, []).append(m)
    for siblings in groups.values():
        assert sum(m.chosen for m in siblings) == 1
        for number, m in enumerate(siblings, 1):
            assert tree.versions(m.id) == (number, len(siblings))
    path = tree.path()
    assert [m.parent_id for m in path] == [None, *(m.id for m in path)][: len(path)]
    assert all(m.id in {n.id for n in messages if n.chosen} for m in path)
    assert tree.leaf_id() not in groups
    for m in path:
        assert tree.lineage(m.id) == path[: path.index(m) + 1]


@given(steps)
def test_a_tree_rebuilt_from_its_messages_is_the_same(moves: list[tuple[bool, int]]) -> None:
    tree = grown(moves)
    check_invariants(tree)
    again = MessageTree(tree.messages())
    assert again.messages() == tree.messages()
    assert again.path() == tree.path()
    assert sound(tree.messages()) == tree.messages()


@given(st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 12), st.booleans()), max_size=30))
def test_any_rows_become_a_sound_tree_without_losing_one(rows: list[tuple[int, int | None, bool]]) -> None:
    broken = [tree_message(f"m{a}", None if b is None else f"m{b}", chosen=c) for a, b, c in rows]
    repaired = sound(broken)
    assert {m.id for m in repaired} == {m.id for m in broken}
    assert len(repaired) == len({m.id for m in broken})
    check_invariants(MessageTree(repaired))


def test_regenerating_and_leafing_through_versions() -> None:
    tree = MessageTree([tree_message("q", None), tree_message("a1", "q")])
    tree.add(tree_message("a2", "q"))
    assert [m.id for m in tree.path()] == ["q", "a2"]
    assert tree.versions("a2") == (2, 2)
    assert tree.sibling("a2", -1) == "a1"
    assert tree.sibling("a2", 1) is None
    tree.choose("a1")
    tree.add(tree_message("q2", "a1"))
    tree.choose("a2")
    tree.choose("a1")
    assert [m.id for m in tree.path()] == ["q", "a1", "q2"], "a branch is shown as it was left"


def test_an_update_changes_the_text_and_not_the_place() -> None:
    tree = MessageTree([tree_message("q", None), tree_message("a", "q")])
    tree.update(replace(tree_message("a", None), content="new"))
    assert tree["a"].content == "new"
    assert tree["a"].parent_id == "q"


def test_a_message_without_its_parent_is_refused() -> None:
    with pytest.raises(ValueError, match="parent"):
        MessageTree([tree_message("a", "nowhere")])
    with pytest.raises(ValueError, match="already"):
        MessageTree([tree_message("a", None), tree_message("a", None)])
