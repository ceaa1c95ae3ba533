"""Conversations on disk: one SQLite file, accessed by one dedicated thread."""

from app.services.chat_store.records import (
    AnswerStats,
    Conversation,
    Message,
    MessageState,
    SearchHit,
    new_id,
)
from app.services.chat_store.store import ChatStore
from app.services.chat_store.tree import MessageTree

__all__ = [
    "AnswerStats",
    "ChatStore",
    "Conversation",
    "Message",
    "MessageState",
    "MessageTree",
    "SearchHit",
    "new_id",
]
