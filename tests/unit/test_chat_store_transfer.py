"""Export and import: JSON gives back everything, Markdown the visible path, and no bad file does harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.json_format import NotAChatFileError, from_json, to_json
from app.services.chat_store.markdown_format import from_markdown, to_markdown
from app.services.chat_store.records import AnswerStats, Conversation, Message, MessageState, clean_text
from app.services.chat_store.recovery import open_checked
from app.services.chat_store.transfer import export_chats, import_chats
from app.services.chat_store.tree import MessageTree
from engine.common.config import SamplingParams
from engine.common.errors import EngineError

texts = st.text(max_size=40).map(clean_text)
times = st.floats(0, 1e10)
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
    assert from_json(to_json([chat])) == [chat]


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
    for text in (json.dumps(raw), json.dumps(document)):
        with suppress(NotAChatFileError):
            from_json(text)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[ChatDatabase]:
    opened = open_checked(tmp_path / "chats.sqlite3")
    yield opened
    opened.close()


def branched(database: ChatDatabase) -> tuple[Conversation, list[Message]]:
    conversation = Conversation("c", "Titel", created_at=1.0, updated_at=2.0)
    messages = [
        Message("q", "c", None, "user", "question"),
        Message("a1", "c", "q", "assistant", "first", chosen=False),
        Message("a2", "c", "q", "assistant", "second"),
    ]
    database.add_conversations([(conversation, messages)])
    return conversation, messages


def test_a_chat_imported_where_it_already_is_becomes_a_copy(database: ChatDatabase, tmp_path: Path) -> None:
    conversation, messages = branched(database)
    file = tmp_path / "chat.json"
    export_chats(database, [conversation.id], file)
    (copy,) = import_chats(database, file)
    assert copy.id != conversation.id
    assert len(database.conversations()) == 2
    copied = database.messages(copy.id)
    assert [(m.content, m.chosen) for m in copied] == [(m.content, m.chosen) for m in messages]
    assert not {m.id for m in copied} & {m.id for m in messages}


def test_a_chat_imported_into_an_empty_store_is_the_same(database: ChatDatabase, tmp_path: Path) -> None:
    conversation, messages = branched(database)
    file = tmp_path / "chat.json"
    export_chats(database, [conversation.id], file)
    other = open_checked(tmp_path / "other.sqlite3")
    assert import_chats(other, file) == (conversation,)
    assert list(other.messages(conversation.id)) == messages
    other.close()


def test_markdown_export_and_import_through_files(database: ChatDatabase, tmp_path: Path) -> None:
    branched(database)
    file = tmp_path / "chat.md"
    export_chats(database, ["c"], file)
    assert file.read_text(encoding="utf-8").startswith("# Titel\n")
    (copy,) = import_chats(database, file)
    assert [m.content for m in database.messages(copy.id)] == ["question", "second"]


def test_an_export_that_fails_leaves_the_old_file(database: ChatDatabase, tmp_path: Path) -> None:
    branched(database)
    folder = tmp_path / "folder.json"
    folder.mkdir()
    with pytest.raises(EngineError, match="could not be written"):
        export_chats(database, ["c"], folder)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


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
    ],
)
def test_a_bad_file_is_one_sentence_and_adds_nothing(
    database: ChatDatabase, tmp_path: Path, name: str, data: bytes
) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(EngineError, match=rf"^{name} was not imported: .+\.$"):
        import_chats(database, file)
    assert database.conversations() == ()


def test_two_chats_with_one_id_add_nothing(database: ChatDatabase, tmp_path: Path) -> None:
    chat = (Conversation("c", "t"), [Message("m", "c", None, "user", "x")])
    file = tmp_path / "twice.json"
    file.write_text(to_json([chat, chat]), encoding="utf-8")
    with pytest.raises(EngineError, match="same id"):
        import_chats(database, file)
    assert database.conversations() == ()


def test_a_file_that_is_not_there_is_one_sentence(database: ChatDatabase, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"none\.json"):
        import_chats(database, tmp_path / "none.json")
