"""The chats' file: its tables and versions, search, documents, calls of tools, export and import."""

import base64
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.services.chat_store.database import PURGE_AFTER_S, ChatDatabase
from app.services.chat_store.json_format import (
    Merged,
    NotAChatFileError,
    from_json,
    from_markdown,
    merge,
    to_export,
    to_json,
    to_markdown,
)
from app.services.chat_store.reading import Unread, read_chats
from app.services.chat_store.records import (
    MATCH_END,
    MATCH_START,
    AnswerStats,
    Attachment,
    Conversation,
    Message,
    MessageState,
    Source,
    Step,
    ToolUse,
    cited,
    clean_text,
    new_conversation,
    new_id,
    sampling_from_dict,
    sampling_from_json,
    sampling_to_json,
    shown_sources,
    steps_from_json,
    steps_to_json,
)
from app.services.chat_store.recovery import open_checked, recover
from app.services.chat_store.schema import MIGRATIONS, NewerDatabaseError, connect, migrate, version_of
from app.services.chat_store.store import search
from app.services.chat_store.tree import MessageTree
from engine.batch_files.documents import Part
from engine.common.chat import Picture
from engine.common.config import SamplingParams


@pytest.fixture
def database(tmp_path: Path) -> Iterator[ChatDatabase]:
    with closing(open_checked(tmp_path / "chats.sqlite3")) as opened:
        yield opened


def chat(database: ChatDatabase, *contents: str, **fields: object) -> tuple[Conversation, list[Message]]:
    conversation = new_conversation(**fields)
    database.add_conversations([(conversation, ())])
    messages: list[Message] = []
    for number, content in enumerate(contents):
        parent = messages[-1].id if messages else None
        role = "assistant" if number % 2 else "user"
        messages.append(Message(f"{conversation.id}-{number}", conversation.id, parent, role, content))
        database.add_message(messages[-1])
    return conversation, messages


def test_changes_touch_only_the_fields_that_they_name(database: ChatDatabase) -> None:
    conversation, _ = chat(database, title="old", draft="kept")
    database.change_conversation(conversation.id, {"title": "new", "pinned": True, "sampling": SamplingParams()})
    expected = replace(conversation, title="new", pinned=True, sampling=SamplingParams())
    assert database.conversation(conversation.id) == expected
    with pytest.raises(ValueError, match="not fields"):
        database.change_conversation(conversation.id, {"id = '' --": 1})


def test_a_parent_in_another_conversation_is_refused(database: ChatDatabase) -> None:
    _, messages = chat(database, "q")
    other, _ = chat(database)
    with pytest.raises(sqlite3.IntegrityError):
        database.add_message(Message("x", other.id, messages[0].id, "user", "x"))
    assert database.messages(other.id) == ()


def test_deleting_hides_and_purging_removes(database: ChatDatabase) -> None:
    conversation, _ = chat(database, "needle in here", title="t")
    database.set_deleted(conversation.id, 1000.0)
    assert database.conversations() == ()
    assert search(database.connection, "needle") == ()
    assert database.purge(1000.0 + PURGE_AFTER_S) == 0
    database.set_deleted(conversation.id, None)
    assert len(search(database.connection, "needle")) == 1
    database.set_deleted(conversation.id, 1000.0)
    assert database.purge(1001.0 + PURGE_AFTER_S) == 1
    assert database.messages(conversation.id) == ()
    database.connection.execute("INSERT INTO messages_fts (messages_fts, rank) VALUES ('integrity-check', 1)")


RED, BLUE = (Picture("image/png", base64.b64encode(b"\x89PNG\r\n\x1a\n" + each).decode()) for each in (b"red", b"blue"))


def test_unsent_pictures_stay_in_order_until_others_replace_them_or_their_chat_goes(database: ChatDatabase) -> None:
    def count() -> int:
        return int(database.connection.execute("SELECT count(*) FROM unsent_pictures").fetchone()[0])

    first, _ = chat(database, "q")
    second, _ = chat(database)
    database.set_unsent_pictures(first.id, (RED, BLUE, RED))
    database.set_unsent_pictures(second.id, (BLUE,))
    assert database.unsent_pictures(first.id) == (RED, BLUE, RED)
    assert not database.messages(first.id)[0].pictures
    database.set_unsent_pictures(first.id, (BLUE,))
    assert database.unsent_pictures(first.id) == (BLUE,)
    database.set_deleted(first.id, 1000.0)
    database.set_deleted(first.id, None)
    assert database.unsent_pictures(first.id) == (BLUE,)
    database.set_deleted(first.id, 1000.0)
    database.purge(1001.0 + PURGE_AFTER_S)
    assert count() == 1
    database.set_unsent_pictures(second.id, ())
    assert count() == 0


def test_unsent_pictures_come_back_from_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    database = open_checked(path)
    conversation, messages = chat(database, "q")
    shown = replace(messages[0], id="later", parent_id=messages[0].id, pictures=(BLUE,))
    database.add_message(shown)
    database.set_unsent_pictures(conversation.id, (RED, BLUE))
    database.close()
    path.write_bytes(bytes(100) + path.read_bytes()[100:])
    database, recovery = recover(path)
    assert recovery.lost == 0
    assert database.unsent_pictures(conversation.id) == (RED, BLUE)
    assert [message.pictures for message in database.messages(conversation.id)] == [(), (BLUE,)]
    database.close()


def test_search_finds_words_in_any_order_and_says_where(database: ChatDatabase) -> None:
    first, _ = chat(database, "Why does a railway need a hump?", "Gravity sorts the cars.", title="Railways")
    second, _ = chat(database, "What is gravity?", title="Physics")
    hits = search(database.connection, "CARS grav")
    assert [hit.conversation.id for hit in hits] == [first.id]
    assert f"{MATCH_START}Gravity{MATCH_END}" in hits[0].snippet
    assert {hit.conversation.id for hit in search(database.connection, "gravity")} == {first.id, second.id}
    assert [hit.message_id for hit in search(database.connection, "physi")] == [None]
    assert search(database.connection, "") == search(database.connection, "  ") == ()


def test_search_knows_accents_and_scripts_without_spaces(database: ChatDatabase) -> None:
    first, _ = chat(database, "Un café crème", title="x")
    second, _ = chat(database, "日本の首都は東京です。", title="y")
    assert [hit.conversation.id for hit in search(database.connection, "cafe")] == [first.id]
    assert [hit.conversation.id for hit in search(database.connection, "首都")] == [second.id]


@given(st.text(max_size=30))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_breaks_the_search(database: ChatDatabase, text: str) -> None:
    search(database.connection, text)
    conversation, _ = chat(database, text, title=text)
    search(database.connection, text)
    database.set_deleted(conversation.id, 0.0)


def test_an_answer_being_written_enters_the_index_when_it_ends(database: ChatDatabase) -> None:
    conversation, (question,) = chat(database, "q")
    answer = Message("a", conversation.id, question.id, "assistant", "", MessageState.STREAMING)
    database.add_message(answer)
    database.save_step(replace(answer, content="half a walrus"))
    assert search(database.connection, "walrus") == ()
    assert database.end_interrupted("It stopped.") == 1
    assert len(search(database.connection, "walrus")) == 1
    kept = database.messages(conversation.id)[1]
    assert (kept.state, kept.reason) == (MessageState.PARTIAL, "It stopped.")
    database.connection.execute("INSERT INTO messages_fts (messages_fts, rank) VALUES ('integrity-check', 1)")


def test_what_an_older_version_dropped_from_the_index_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    connection = connect(path)
    migrate(connection, MIGRATIONS[:2])
    add = "INSERT INTO conversations (id, title, created_at, updated_at) VALUES ('c', 'old', 1, 2)"
    connection.execute(add)
    connection.execute(
        "INSERT INTO messages (id, conversation_id, parent_id, role, content, state, created_at, chosen) "
        "VALUES ('m', 'c', NULL, 'user', 'a walrus', 'complete', 3, 1)"
    )
    connection.execute("UPDATE messages SET content = content")
    assert connection.execute("SELECT rowid FROM messages_fts WHERE messages_fts MATCH 'walrus'").fetchall() == []
    connection.close()
    database = open_checked(path)
    assert len(search(database.connection, "walrus")) == 1
    database.close()


def test_text_that_utf8_cannot_hold_is_kept_as_far_as_it_can(database: ChatDatabase) -> None:
    conversation, _ = chat(database, "a\x00b\ud83d")
    assert database.messages(conversation.id)[0].content == "a\ufffdb\ufffd"


def test_an_older_file_is_brought_up_to_date_and_a_newer_one_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    database = open_checked(path)
    chat(database, "q", title="kept")
    assert version_of(database.connection) == len(MIGRATIONS)
    newer = (*MIGRATIONS, ("ALTER TABLE conversations ADD COLUMN colour TEXT NOT NULL DEFAULT 'none'",))
    migrate(database.connection, newer)
    assert database.connection.execute("SELECT title, colour FROM conversations").fetchall() == [("kept", "none")]
    database.close()
    before = path.read_bytes()
    with pytest.raises(NewerDatabaseError):
        open_checked(path)
    assert path.read_bytes() == before


def filled_before_reasoning(path: Path) -> None:
    """A file of the first version, with a chat of a question and a long answer."""
    connection = connect(path)
    migrate(connection, MIGRATIONS[:1])
    add = "INSERT INTO conversations (id, title, created_at, updated_at) VALUES (?, 'old', 1, 2)"
    connection.execute(add, (f"c{ID}",))
    for number, (role, content) in enumerate((("user", "where is it"), ("assistant", "in Paris " * 900))):
        parent = f"m{number - 1}{ID}" if number else None
        values = (f"m{number}{ID}", f"c{ID}", parent, role, content)
        connection.execute(
            "INSERT INTO messages (id, conversation_id, parent_id, role, content, state, created_at, chosen) "
            "VALUES (?, ?, ?, ?, ?, 'complete', 3, 1)",
            values,
        )
    connection.close()


ID = "0123456789abcdef"


def test_a_file_from_before_there_was_reasoning_gets_room_for_it(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    filled_before_reasoning(path)
    database = open_checked(path)
    question, answer = database.messages(f"c{ID}")
    assert (question.content, question.reasoning, answer.reasoning_s) == ("where is it", "", 0.0)
    begun = Message("new", f"c{ID}", answer.id, "assistant", "", MessageState.STREAMING)
    database.add_message(begun)
    thought = replace(begun, content="again", state=MessageState.COMPLETE, reasoning="sharks", reasoning_s=3.5)
    database.update_message(thought)
    assert database.messages(f"c{ID}")[1:] == (answer, thought)
    assert [hit.message_id for hit in search(database.connection, "Paris")] == [answer.id]
    assert search(database.connection, "sharks") == ()  # what was said is found, not what was thought
    database.close()
    open_checked(path).close()


def test_a_damaged_file_with_rows_of_both_kinds_is_recovered(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    filled_before_reasoning(path)
    database = open_checked(path)
    first, second = database.messages(f"c{ID}")
    later = Message(f"m2{ID}", f"c{ID}", second.id, "assistant", "and", reasoning="hm", reasoning_s=1.5)
    database.add_message(later)
    database.close()
    path.write_bytes(bytes(100) + path.read_bytes()[100:])
    database, recovery = recover(path)
    assert recovery.lost == 0
    assert database.messages(f"c{ID}") == (first, second, later)
    database.close()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    database = open_checked(tmp_path / "chats.sqlite3")
    broken = (*MIGRATIONS, ("ALTER TABLE conversations ADD COLUMN colour TEXT", "THIS IS NOT SQL"))
    with pytest.raises(sqlite3.OperationalError):
        migrate(database.connection, broken)
    assert version_of(database.connection) == len(MIGRATIONS)
    columns = [row[1] for row in database.connection.execute("PRAGMA table_info(conversations)")]
    assert "colour" not in columns
    database.close()


def test_the_file_is_set_up_for_crashes_and_power_cuts(database: ChatDatabase) -> None:
    ask = database.connection.execute
    assert ask("PRAGMA journal_mode").fetchone() == ("wal",)
    assert ask("PRAGMA synchronous").fetchone() == (2,)
    assert ask("PRAGMA foreign_keys").fetchone() == (1,)


@pytest.mark.parametrize(
    "bad", ["", "{", "[]", '{"temperature": "hot"}', '{"stop": "x"}', '{"top_k": 1.5}', '{"top_p": 7}']
)
def test_sampling_that_makes_no_sense_means_the_defaults(bad: str) -> None:
    assert sampling_from_json(bad) is None


def test_sampling_round_trip_and_unknown_keys() -> None:
    params = SamplingParams(temperature=0.4, stop=("x",), seed=3)
    assert sampling_from_json(sampling_to_json(params)) == params
    assert sampling_from_dict({"temperature": 1, "of_the_future": 3}) == SamplingParams(temperature=1)
    dry = SamplingParams(dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3, dry_range=64, dry_breakers=("\n",))
    assert sampling_from_json(sampling_to_json(dry)) == dry


@pytest.mark.parametrize("biases", ["3", "[3]", '[["a", 1]]', "[[1, 2, 3]]", "[[1, 1e9]]", "[[1, true]]"])
def test_biases_of_tokens_come_back_as_they_were_or_not_at_all(biases: str) -> None:
    kept = SamplingParams(logit_bias=((3, 1.5), (4, -2.0)))
    assert sampling_from_json(sampling_to_json(kept)) == kept
    assert sampling_from_json(f'{{"logit_bias": {biases}}}') is None


def test_sampling_saved_before_there_was_dry_keeps_all_it_had() -> None:
    kept = '{"temperature": 0.7, "top_k": 0, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1, "seed": null, '
    kept += '"stop": ["END"], "max_tokens": 1024, "beams": 1}'
    before = SamplingParams(
        temperature=0.7, top_p=0.95, min_p=0.05, repetition_penalty=1.1, stop=("END",), max_tokens=1024
    )
    assert sampling_from_json(kept) == before
    assert not before.uses_dry


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


PARTS = (Part("first page", 1, "A"), Part("second page: ünï", 2, ""))


def chat_with(database: ChatDatabase, *documents: Attachment) -> tuple[Conversation, Message, Message]:
    conversation = Conversation(new_id(), title="about it", created_at=1.0, updated_at=1.0)
    question = Message(new_id(), conversation.id, None, "user", "What?", created_at=1.0, attachments=documents)
    sources = (Source(1, documents[0].id, "a.pdf", 2, "", 1, 1, "second page", is_best=True),) if documents else ()
    answer = Message(new_id(), conversation.id, question.id, "assistant", "That [1].", created_at=2.0, sources=sources)
    database.add_conversations([(conversation, (question, answer))])
    return conversation, question, answer


def document(**fields: object) -> Attachment:
    return replace(Attachment(new_id(), "a.pdf", path="/home/me/a.pdf", pages=2, characters=30, is_read=True), **fields)  # type: ignore[arg-type]


def documents_in(database: ChatDatabase) -> int:
    return int(database.connection.execute("SELECT count(*) FROM documents").fetchone()[0])


def test_a_document_is_kept_with_its_text_and_sources(database: ChatDatabase) -> None:
    one = document(is_read=False)
    conversation, question, answer = chat_with(database, one)
    database.update_document(replace(one, is_read=True), PARTS)
    assert database.document_parts(one.id) == PARTS
    assert database.messages(conversation.id) == (replace(question, attachments=(replace(one, is_read=True),)), answer)


def test_a_document_goes_with_the_last_that_has_it(database: ChatDatabase) -> None:
    one = document()
    first, question, _ = chat_with(database, one)
    second, _, _ = chat_with(database, one)
    version = replace(question, id=new_id())
    database.add_message(version)
    assert documents_in(database) == 1
    assert database.documents_of(first.id) == {one.id}
    database.set_deleted(first.id, time.time() - 10**6)
    assert database.documents_of(live=True) == {one.id}
    database.purge()
    assert documents_in(database) == 1
    database.set_deleted(second.id, time.time() - 10**6)
    assert database.documents_of(live=True) == set()
    database.purge()
    assert documents_in(database) == 0
    assert database.connection.execute("SELECT count(*) FROM sources").fetchone() == (0,)


def test_what_is_not_sent_keeps_its_text_when_others_come_and_go(database: ChatDatabase) -> None:
    conversation, _, _ = chat_with(database)
    one, two, three = document(), document(), document()
    database.set_unsent_attachments(conversation.id, [one, two])
    database.update_document(one, PARTS)
    database.set_unsent_attachments(conversation.id, [three, one])
    assert database.unsent_attachments(conversation.id) == (three, one)
    assert database.document_parts(one.id) == PARTS
    assert documents_in(database) == 2
    question = Message(new_id(), conversation.id, None, "user", "", created_at=1.0, attachments=(one,))
    database.add_message(question)
    database.set_unsent_attachments(conversation.id, [])
    assert database.document_parts(one.id) == PARTS
    assert documents_in(database) == 1


def test_a_damaged_file_gives_documents_back(database: ChatDatabase, tmp_path: Path) -> None:
    one, waiting = document(), document(name="b.txt")
    conversation, question, answer = chat_with(database, one)
    database.update_document(one, PARTS)
    database.set_unsent_attachments(conversation.id, [waiting])
    database.close()
    path = tmp_path / "chats.sqlite3"
    path.write_bytes(b"\0" * 100 + path.read_bytes()[100:])
    found, recovery = recover(path)
    assert (recovery.messages, recovery.lost) == (2, 0)
    assert found.messages(conversation.id) == (question, answer)
    assert found.document_parts(one.id) == PARTS
    assert [each.name for each in found.unsent_attachments(conversation.id)] == ["b.txt"]
    found.close()


def test_exports_have_the_texts_once_and_imports_restore_them(database: ChatDatabase, tmp_path: Path) -> None:
    one = document()
    conversation, question, answer = chat_with(database, one)
    database.update_document(one, PARTS)
    database.add_message(replace(question, id=new_id(), content="Again?"))
    text = to_json([(conversation, to_export(database, conversation.id))])
    assert text.count("second page: ünï") == 1
    assert "/home/me" not in text
    chats, _ = from_json(json.loads(text))
    assert merge(database, chats).known == (conversation,)
    other = open_checked(tmp_path / "other.sqlite3")
    assert merge(other, chats).added == (conversation,)
    messages = other.messages(conversation.id)
    assert messages[0].attachments == (replace(one, path=""),)
    assert messages[2].attachments == messages[0].attachments
    assert messages[1].sources[0].attachment == one.id
    assert other.document_parts(one.id) == PARTS
    other.close()
    text = to_markdown(conversation, MessageTree(to_export(database, conversation.id)).path())
    assert "a.pdf, not in this file" in text
    assert answer.content == "That [1]."


@pytest.mark.parametrize(
    "wrong", ['"parts": 5', '"parts": [[1, 2, 3]]', '"kind": "device"', '"pages": "many"', '"name": null']
)
def test_a_damaged_export_is_refused_whole(wrong: str) -> None:
    question = Message("m", "c", None, "user", "?", created_at=1.0, attachments=(document(id="d"),))
    text = to_json([(Conversation("c", created_at=1.0, updated_at=1.0), [question])])
    name = wrong.partition(":")[0]
    sound = next(line.strip().rstrip(",") for line in text.splitlines() if line.strip().startswith(name + ":"))
    with pytest.raises(NotAChatFileError):
        from_json(json.loads(text.replace(sound, wrong)))


def test_the_sources_that_an_answer_cites_are_shown() -> None:
    assert cited("As [1], [2, 3] and 【5】 say [7-9], not [x] or [2024-01]") >= {1, 2, 3, 5, 7, 8, 9}
    assert cited("nothing") == frozenset()
    sources = tuple(Source(number, "d", "a.pdf", is_best=number == 4) for number in range(1, 6))
    answer = Message("m", "c", None, "assistant", "So [2][5].", sources=sources)
    assert [one.number for one in shown_sources(answer)] == [2, 5]
    assert [one.number for one in shown_sources(replace(answer, content="So."))] == [4]
    assert [one.number for one in shown_sources(replace(answer, content="So [99]."))] == [4]


STEPS = (
    Step("I look.", "Hm.", (ToolUse("1", "search", '{"q": "a"}', "found <b>\n<!-- x -->", "done", "web", 1.5),)),
    Step("", "", (ToolUse("2", "search", "{}", "The user did not allow this call.", "denied", "web"),)),
)
CHAT = Conversation("c", title="Tools", tools='["web/search"]')
QUESTION = Message("q", "c", None, "user", "When?")
ANSWER = Message("a", "c", "q", "assistant", "At nine.", reasoning="So.", steps=STEPS)


def test_they_are_kept_in_the_file(tmp_path: Path) -> None:
    connection = connect(tmp_path / "chats.sqlite")
    migrate(connection)
    with closing(ChatDatabase(connection)) as database:
        database.add_conversations([(CHAT, [QUESTION, replace(ANSWER, steps=())])])
        database.set_steps(ANSWER)
        assert database.messages("c")[1] == ANSWER
        assert database.conversations()[0].tools == CHAT.tools


def test_exports_hold_them_and_imports_allow_nothing() -> None:
    ((chat, messages),), damaged = from_json(json.loads(to_json([(CHAT, [QUESTION, ANSWER])])))
    assert damaged == 0
    assert messages[1].steps == STEPS
    assert chat.tools == "[]"  # what may run unasked is not for a file to say
    text = to_markdown(CHAT, [QUESTION, ANSWER])
    assert "<summary>search" in text
    assert "found" in text
    _chat, read = from_markdown(text)
    assert [(turn.role, turn.content, turn.reasoning) for turn in read] == [
        ("user", "When?", ""),
        ("assistant", "At nine.", "So."),
    ]


def test_what_is_no_call_is_left_out() -> None:
    assert steps_from_json(steps_to_json(STEPS)) == STEPS
    for text in ("", "x", "[]", "{}", '{"steps": 1}', '{"steps": [1, {"calls": 1}]}'):
        assert steps_from_json(text) == ()
    odd = {"steps": [{"text": 1, "calls": [{"id": "1", "name": "x", "state": "exploded"}, {"id": 1}]}]}
    assert steps_from_json(json.dumps(odd)) == (Step(),)
