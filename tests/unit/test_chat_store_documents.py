"""Documents in the chats' file: they belong to messages, are shared by versions and branches, and go with the last."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.json_format import NotAChatFileError, from_json, merge, to_export, to_json, to_markdown
from app.services.chat_store.records import Attachment, Conversation, Message, Source, cited, new_id, shown_sources
from app.services.chat_store.recovery import open_checked, recover
from app.services.chat_store.tree import MessageTree
from engine.batch_files.documents import Part

PARTS = (Part("first page", 1, "A"), Part("second page: ünï", 2, ""))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[ChatDatabase]:
    with closing(open_checked(tmp_path / "chats.sqlite3")) as database:
        yield database


def chat(database: ChatDatabase, *documents: Attachment) -> tuple[Conversation, Message, Message]:
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
    conversation, question, answer = chat(database, one)
    database.update_document(replace(one, is_read=True), PARTS)
    assert database.document_parts(one.id) == PARTS
    assert database.messages(conversation.id) == (replace(question, attachments=(replace(one, is_read=True),)), answer)


def test_a_document_goes_with_the_last_that_has_it(database: ChatDatabase) -> None:
    one = document()
    first, question, _ = chat(database, one)
    second, _, _ = chat(database, one)
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
    conversation, _, _ = chat(database)
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
    conversation, question, answer = chat(database, one)
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
    conversation, question, answer = chat(database, one)
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
