"""The database's tables: the tree as rows, full-text search, versions of the file."""

import base64
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.services.chat_store.database import PURGE_AFTER_S, ChatDatabase
from app.services.chat_store.records import (
    MATCH_END,
    MATCH_START,
    Conversation,
    Message,
    MessageState,
    new_conversation,
    sampling_from_dict,
    sampling_from_json,
    sampling_to_json,
)
from app.services.chat_store.recovery import open_checked, recover
from app.services.chat_store.schema import MIGRATIONS, NewerDatabaseError, connect, migrate, version_of
from app.services.chat_store.store import search
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
