"""Conversations on disk: one SQLite file, accessed by one dedicated thread."""

from app.services.chat_store.records import (
    AnswerStats,
    Attachment,
    Conversation,
    Fold,
    Folder,
    Message,
    MessageState,
    SearchHit,
    Source,
    new_id,
)
from app.services.chat_store.store import ChatStore
from app.services.chat_store.tree import MessageTree
from engine.tools.rounds import Step, ToolUse

__all__ = [
    "AnswerStats",
    "Attachment",
    "ChatStore",
    "Conversation",
    "Fold",
    "Folder",
    "Message",
    "MessageState",
    "MessageTree",
    "SearchHit",
    "Source",
    "Step",
    "ToolUse",
    "new_id",
]
