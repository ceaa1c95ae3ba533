"""Full-text search over titles and messages: words in any order, the last one as a prefix."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator

from app.services.chat_store.database import CONVERSATION_COLUMNS, conversation_from_row
from app.services.chat_store.records import MATCH_END, MATCH_START, SearchHit, clean_text

MOST_HITS = 100
_SNIPPET_WORDS = 12
_AROUND = 40
# Scripts without spaces: the index would take a whole clause for one word, so these are searched as plain text.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
_LIVING = "m.id NOT IN (SELECT message_id FROM deleted_messages)"
_COLUMNS = ", ".join(f"c.{name}" for name in CONVERSATION_COLUMNS.split(", "))


def search(connection: sqlite3.Connection, text: str) -> tuple[SearchHit, ...]:
    """Conversations that contain every word of `text`, one hit each, titles before messages, best first."""
    text = clean_text(text).strip()
    if not text:
        return ()
    hits: dict[str, SearchHit] = {}
    words = re.findall(r"\w+", text)
    plain = bool(_UNSPACED.search(text)) or not words
    for hit in _containing(connection, text) if plain else _matching(connection, words):
        hits.setdefault(hit.conversation.id, hit)
        if len(hits) == MOST_HITS:
            break
    return tuple(hits.values())


def _matching(connection: sqlite3.Connection, words: list[str]) -> Iterator[SearchHit]:
    query = " ".join(f'"{word}"' for word in words) + "*"
    marks = (MATCH_START, MATCH_END)
    for *fields, snippet in connection.execute(
        f"SELECT {_COLUMNS}, highlight(titles_fts, 0, ?, ?) FROM titles_fts "
        "JOIN conversations c ON c.seq = titles_fts.rowid "
        "WHERE titles_fts MATCH ? AND c.deleted_at IS NULL ORDER BY c.updated_at DESC",
        (*marks, query),
    ):
        yield SearchHit(conversation_from_row(tuple(fields)), snippet)
    for *fields, message_id, snippet in connection.execute(
        f"SELECT {_COLUMNS}, m.id, snippet(messages_fts, 0, ?, ?, '…', {_SNIPPET_WORDS}) FROM messages_fts "
        "JOIN messages m ON m.seq = messages_fts.rowid JOIN conversations c ON c.id = m.conversation_id "
        f"WHERE messages_fts MATCH ? AND c.deleted_at IS NULL AND {_LIVING} ORDER BY messages_fts.rank LIMIT 1000",
        (*marks, query),
    ):
        yield SearchHit(conversation_from_row(tuple(fields)), _one_line(snippet), message_id)


def _containing(connection: sqlite3.Connection, text: str) -> Iterator[SearchHit]:
    pattern = "%" + re.sub(r"([%_\\])", r"\\\1", text) + "%"
    for fields in connection.execute(
        f"SELECT {_COLUMNS} FROM conversations c WHERE c.title LIKE ? ESCAPE '\\' AND c.deleted_at IS NULL "
        "ORDER BY c.updated_at DESC",
        (pattern,),
    ):
        conversation = conversation_from_row(fields)
        yield SearchHit(conversation, _around(conversation.title, text))
    for *fields, message_id, content in connection.execute(
        f"SELECT {_COLUMNS}, m.id, m.content FROM messages m JOIN conversations c ON c.id = m.conversation_id "
        f"WHERE m.content LIKE ? ESCAPE '\\' AND c.deleted_at IS NULL AND {_LIVING} ORDER BY m.seq DESC LIMIT 1000",
        (pattern,),
    ):
        yield SearchHit(conversation_from_row(tuple(fields)), _around(content, text), message_id)


def _around(content: str, text: str) -> str:
    at = max(content.lower().find(text.lower()), 0)
    start, end = max(at - _AROUND, 0), at + len(text)
    before = ("…" if start else "") + content[start:at]
    after = content[end : end + _AROUND] + ("…" if end + _AROUND < len(content) else "")
    return _one_line(f"{before}{MATCH_START}{content[at:end]}{MATCH_END}{after}")


def _one_line(text: str) -> str:
    """Without line breaks and Markdown markers, which say nothing in a list."""
    return " ".join(re.sub(r"[#>|]+", " ", re.sub(r"[*`]+", "", text)).split())
