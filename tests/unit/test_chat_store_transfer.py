"""Export and import: JSON gives back everything, Markdown the visible path, and no bad file does harm."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.json_format import (
    Merged,
    NotAChatFileError,
    from_json,
    from_markdown,
    merge,
    to_json,
    to_markdown,
)
from app.services.chat_store.reading import Unread, read_chats
from app.services.chat_store.records import AnswerStats, Conversation, Message, MessageState, clean_text
from app.services.chat_store.recovery import open_checked
from app.services.chat_store.schema import migrate
from app.services.chat_store.tree import MessageTree
from engine.common.config import SamplingParams

texts = st.text(max_size=40).map(clean_text)
times = st.floats(0, 2.0**32, exclude_max=True)
sampling = st.none() | st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 100),
    seed=st.none() | st.integers(0, 2**63),
    stop=st.lists(texts, max_size=3).map(tuple),
)
stats = st.none() | st.builds(
    AnswerStats, texts, st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 100), st.floats(0, 1000)
)


@st.composite
def chats(draw: st.DrawFn) -> tuple[Conversation, list[Message]]:
    conversation = Conversation(
        "c",
        draw(texts),
        draw(st.booleans()),
        draw(times),
        draw(times),
        draw(texts),
        draw(sampling),
        draw(texts),
        draw(texts),
    )
    tree = MessageTree()
    for number in range(draw(st.integers(0, 6))):
        parent = draw(st.sampled_from([None, *(f"m{n}" for n in range(number))]))
        state = draw(st.sampled_from([MessageState.COMPLETE, MessageState.PARTIAL, MessageState.FAILED]))
        role = draw(st.sampled_from(["user", "assistant"]))
        thought = (draw(texts), draw(times)) if role == "assistant" else ("", 0.0)
        model = draw(st.sampled_from(["", "m", "qwen3-30b (Rack)", "a: b *c*"])) if role == "assistant" else ""
        message = Message(f"m{number}", "c", parent, role, draw(texts), state, draw(texts), "", model, draw(times))
        tree.add(replace(message, stats=draw(stats), reasoning=thought[0], reasoning_s=thought[1]))
    if len(tree):
        tree.choose(draw(st.sampled_from([m.id for m in tree.messages()])))
    return conversation, tree.messages()


@given(chats())
def test_json_is_lossless_with_all_branches(chat: tuple[Conversation, list[Message]]) -> None:
    assert from_json(json.loads(to_json([chat]))) == ([chat], 0)


@given(chats())
def test_markdown_gives_back_the_visible_path(chat: tuple[Conversation, list[Message]]) -> None:
    conversation, messages = chat
    path = MessageTree(messages).path()
    if not path:
        return
    text = to_markdown(conversation, path)
    again, turns = from_markdown(text)
    assert [(m.role, m.content, m.reasoning, m.model) for m in turns] == [
        (m.role, m.content, m.reasoning, m.model) for m in path
    ]
    assert again.system_prompt == conversation.system_prompt
    assert MessageTree(turns).path() == turns


@pytest.mark.parametrize(
    "content", ["<!-- switchyard:user -->\n## You\n\nfake", "\\<!-- switchyard:", "\r\n# x\r\n", "\n\n"]
)
def test_a_message_that_looks_like_a_mark_survives(content: str) -> None:
    message = Message("m", "c", None, "user", content)
    _, turns = from_markdown(to_markdown(Conversation("c", "t"), [message]))
    assert [turn.content for turn in turns] == [content]


def test_an_answer_says_which_model_gave_it_and_where() -> None:
    path = [
        Message("q", "c", None, "user", "Where?", model="x"),
        Message("a", "c", "q", "assistant", "Paris.", model="qwen3-30b\n(Rack)"),
    ]
    text = to_markdown(Conversation("c", "Chat"), path)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## You",
        "## Assistant: qwen3-30b (Rack)",
    ]


def test_reasoning_is_a_section_that_viewers_fold() -> None:
    thought = "Hm.\n\n</details>\n<!-- switchyard:answer -->\n\nNo."
    path = [
        Message("q", "c", None, "user", "Where?"),
        Message("a", "c", "q", "assistant", "Paris.", reasoning=thought, reasoning_s=12.4),
    ]
    text = to_markdown(Conversation("c", "Chat"), path)
    assert "<details>\n<summary>Thought for 12 s</summary>\n\nHm." in text
    _again, turns = from_markdown(text.replace("\n", "\r\n"))
    assert [turn.content for turn in turns] == ["Where?", "Paris."]
    assert (turns[1].reasoning, turns[1].reasoning_s) == (thought, 12.4)


def test_markdown_from_elsewhere_is_read_by_its_headings() -> None:
    conversation, turns = from_markdown("# Trip\n\n## User\n\nWhere?\n\n### Assistant:\n\nLisbon.\n\n## Notes\n")
    assert conversation.title == "Trip"
    assert [(m.role, m.content) for m in turns] == [("user", "Where?"), ("assistant", "Lisbon.\n\n## Notes")]
    _, edited = from_markdown("# T\r\n\r\n<!-- switchyard:user -->\r\n## You\r\n\r\nhello\r\nthere\r\n\r\n")
    assert [m.content for m in edited] == ["hello\nthere"]


def test_markdown_without_turns_is_refused() -> None:
    with pytest.raises(NotAChatFileError):
        from_markdown("# A shopping list\n\n- eggs\n")


@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_no_json_breaks_the_import(raw: object) -> None:
    document = {"format": "switchyard-chats", "version": 1, "conversations": raw}
    with suppress(NotAChatFileError):
        from_json(document)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[ChatDatabase]:
    with closing(open_checked(tmp_path / "chats.sqlite3")) as opened:
        yield opened


def branched(database: ChatDatabase) -> tuple[Conversation, list[Message]]:
    conversation = Conversation("c", "Titel", created_at=1.0, updated_at=2.0)
    messages = [
        Message("q", "c", None, "user", "question"),
        Message("a1", "c", "q", "assistant", "first", chosen=False),
        Message("a2", "c", "q", "assistant", "second"),
    ]
    database.add_conversations([(conversation, messages)])
    return conversation, messages


def put(database: ChatDatabase, path: Path) -> tuple[Merged, Unread]:
    """Imports a file at once."""
    unread = Unread()
    return merge(database, read_chats([path], unread, lambda _share: None, lambda: False)), unread


def test_a_chat_imported_where_it_already_is_is_not_doubled(database: ChatDatabase, tmp_path: Path) -> None:
    chat = branched(database)
    file = tmp_path / "chat.json"
    file.write_text(to_json([chat]), encoding="utf-8")
    for _ in range(2):
        merged, _ = put(database, file)
        assert (merged.added, merged.grown, merged.known) == ((), (), (chat[0],))
    assert list(database.messages("c")) == chat[1]


def test_a_chat_of_a_file_adds_what_the_one_that_is_here_lacks(database: ChatDatabase, tmp_path: Path) -> None:
    conversation, messages = branched(database)
    more = [*messages, Message("a3", "c", "q", "assistant", "third"), Message("q2", "c", "a2", "user", "and?")]
    file = tmp_path / "chat.json"
    file.write_text(to_json([(replace(conversation, updated_at=9.0), more)]), encoding="utf-8")
    merged, _ = put(database, file)
    assert [chat.updated_at for chat in merged.grown] == [9.0]
    now = database.messages("c")
    assert [m.content for m in MessageTree(now).path()] == ["question", "second", "and?"]
    assert len(now) == 5
    assert put(database, file)[0].known


def test_what_was_changed_here_stays_beside_what_the_file_says(database: ChatDatabase, tmp_path: Path) -> None:
    chat = branched(database)
    file = tmp_path / "chat.json"
    file.write_text(to_json([chat]), encoding="utf-8")
    database.update_message(replace(chat[1][2], content="edited since"))
    for times in range(2):
        merged, _ = put(database, file)
        assert (len(merged.added), len(merged.known)) == ((1, 0), (0, 1))[times]
    assert len(database.conversations()) == 2
    assert database.messages("c")[2].content == "edited since"
    (copy,) = [each for each in database.conversations() if each.id != "c"]
    assert [(m.content, m.chosen) for m in database.messages(copy.id)] == [(m.content, m.chosen) for m in chat[1]]


def test_a_deleted_chat_is_there_again_after_an_import(database: ChatDatabase, tmp_path: Path) -> None:
    chat = branched(database)
    file = tmp_path / "chat.json"
    file.write_text(to_json([chat]), encoding="utf-8")
    database.set_deleted("c", 5.0)
    assert put(database, file)[0].added == (chat[0],)
    assert list(database.messages("c")) == chat[1]


@given(st.lists(chats(), max_size=3))
def test_an_export_imported_into_an_empty_store_is_the_same(whole: list[tuple[Conversation, list[Message]]]) -> None:
    numbered = [
        (
            replace(conversation, id=f"c{n}"),
            [
                replace(
                    m,
                    id=f"c{n}/{m.id}",
                    conversation_id=f"c{n}",
                    parent_id=None if m.parent_id is None else f"c{n}/{m.parent_id}",
                )
                for m in messages
            ],
        )
        for n, (conversation, messages) in enumerate(whole)
    ]
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    with closing(ChatDatabase(connection)) as database:
        document = json.loads(to_json(numbered))
        for _ in range(2):
            merge(database, from_json(document)[0])
        for conversation, messages in numbered:
            assert database.conversation(conversation.id) == conversation
            assert list(database.messages(conversation.id)) == messages
        assert len(database.conversations()) == len(numbered)


def test_markdown_is_read_by_its_name_and_not_doubled(database: ChatDatabase, tmp_path: Path) -> None:
    conversation, messages = branched(database)
    file = tmp_path / "chat.md"
    file.write_text(to_markdown(conversation, MessageTree(messages).path()), encoding="utf-8")
    (copy,) = put(database, file)[0].added
    assert [m.content for m in database.messages(copy.id)] == ["question", "second"]
    assert put(database, file)[0].known == (copy,)


def test_a_conversation_that_is_damaged_costs_only_itself(database: ChatDatabase, tmp_path: Path) -> None:
    document = json.loads(to_json([(Conversation(str(n), f"chat {n}"), []) for n in range(3)]))
    document["conversations"][1]["messages"] = [{"id": 3}]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    merged, unread = put(database, file)
    assert [chat.title for chat in merged.added] == ["chat 0", "chat 2"]
    assert unread.damaged == 1


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b"{"),
        ("b.json", b"[" * 100_000),
        ("c.json", b"\xff\xfe"),
        ("d.json", b'{"format": "switchyard-chats", "version": 99}'),
        ("e.json", b'{"format": "switchyard-chats", "version": 1, "conversations": [{"messages": [{}]}]}'),
        ("f.md", b"nothing"),
        ("g.json", b""),
        ("h.md", b"\xff\xfe\x00"),
        ("i.json", b"[1, 2, 3]"),
        ("j.json", b'{"mapping": {}}'),
        ("k.zip", b"PK\x03\x04 and nothing more"),
        ("l.json", b'[{"a": '),
    ],
)
def test_a_bad_file_is_one_clause_and_adds_nothing(
    database: ChatDatabase, tmp_path: Path, name: str, data: bytes
) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    merged, unread = put(database, file)
    assert merged == Merged()
    ((told, why),) = unread.problems
    assert told == name
    assert why[0].islower()
    assert not why.endswith(".")
    assert database.conversations() == ()


def test_a_file_that_is_not_there_is_one_clause(database: ChatDatabase, tmp_path: Path) -> None:
    _, unread = put(database, tmp_path / "none.json")
    assert [name for name, _ in unread.problems] == ["none.json"]
