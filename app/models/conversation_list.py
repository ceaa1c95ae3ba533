"""The list of conversations: grouped by last use, or the results of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Any

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.services.chat_store import Conversation, SearchHit

ENTRY_ROLE = Qt.ItemDataRole.UserRole + 1

Index = QModelIndex | QPersistentModelIndex


class Group(Enum):
    """Section headings, in their order."""

    PINNED = "pinned"
    TODAY = "today"
    YESTERDAY = "yesterday"
    WEEK = "week"
    OLDER = "older"
    FOUND = "found"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: a heading (`conversation` is None) or a conversation, with a snippet if a search found it."""

    group: Group
    conversation: Conversation | None = None
    snippet: str = ""
    message_id: str | None = None


def group_of(conversation: Conversation, now: datetime) -> Group:
    """A conversation's section, by local calendar days."""
    if conversation.pinned:
        return Group.PINNED
    days = (now.date() - datetime.fromtimestamp(conversation.updated_at).date()).days
    if days <= 0:
        return Group.TODAY
    if days == 1:
        return Group.YESTERDAY
    return Group.WEEK if days <= 7 else Group.OLDER


class ConversationListModel(QAbstractListModel):
    """Headings and conversations in one list; `ENTRY_ROLE` gives an `Entry`.

    Args:
        group_title: the text of a heading, in the user's language.
        untitled: the title shown for a conversation that has none.
        now: the clock.
    """

    def __init__(
        self,
        group_title: Callable[[Group], str],
        untitled: str,
        now: Callable[[], datetime] = datetime.now,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._group_title = group_title
        self._untitled = untitled
        self._now = now
        self._conversations: dict[str, Conversation] = {}
        self._hits: tuple[SearchHit, ...] | None = None
        self._entries: list[Entry] = []

    def rowCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self._entries)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        entry = self._entries[index.row()]
        if role == ENTRY_ROLE:
            return entry
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.EditRole, Qt.ItemDataRole.AccessibleTextRole):
            if entry.conversation is None:
                return self._group_title(entry.group)
            return entry.conversation.title or ("" if role == Qt.ItemDataRole.EditRole else self._untitled)
        if role == Qt.ItemDataRole.ToolTipRole and entry.conversation is not None:
            return entry.conversation.title or None
        return None

    def flags(self, index: Index) -> Qt.ItemFlag:
        if not index.isValid() or self._entries[index.row()].conversation is None:
            return Qt.ItemFlag.NoItemFlags
        return Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable | Qt.ItemFlag.ItemIsEditable

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def conversation(self, conversation_id: str) -> Conversation | None:
        """A conversation in the list; None if it is not there."""
        return self._conversations.get(conversation_id)

    def first(self) -> Conversation | None:
        """The topmost conversation shown."""
        return next((entry.conversation for entry in self._entries if entry.conversation is not None), None)

    def row_of(self, conversation_id: str) -> int | None:
        """A conversation's row; None if it is not shown."""
        for number, entry in enumerate(self._entries):
            if entry.conversation is not None and entry.conversation.id == conversation_id:
                return number
        return None

    def set_conversations(self, conversations: Iterable[Conversation]) -> None:
        """Replace the whole list."""
        self._conversations = {conversation.id: conversation for conversation in conversations}
        self._rebuild()

    def put(self, conversation: Conversation) -> None:
        """Add a conversation, or update its fields."""
        old = self._conversations.get(conversation.id)
        self._conversations[conversation.id] = conversation
        if self._hits is not None:
            self._hits = tuple(
                replace(hit, conversation=conversation) if hit.conversation.id == conversation.id else hit
                for hit in self._hits
            )
        row = self.row_of(conversation.id)
        unmoved = old is not None and (old.updated_at, old.pinned) == (conversation.updated_at, conversation.pinned)
        if unmoved and row is not None:
            self._entries[row] = replace(self._entries[row], conversation=conversation)
            self.dataChanged.emit(self.index(row), self.index(row))
        else:
            self._rebuild()

    def remove(self, conversation_id: str) -> None:
        """Remove a conversation from the list."""
        self._conversations.pop(conversation_id, None)
        if self._hits is not None:
            self._hits = tuple(hit for hit in self._hits if hit.conversation.id != conversation_id)
        self._rebuild()

    def show_hits(self, hits: Iterable[SearchHit] | None) -> None:
        """Show search results instead of the sections; None shows the sections again."""
        self._hits = None if hits is None else tuple(hits)
        self._rebuild()

    def _rebuild(self) -> None:
        new = self._wanted()
        if new == self._entries:
            return
        # Only the changed range is reset, so that selection, scroll position and an open editor elsewhere survive.
        old = self._entries
        start = 0
        while start < min(len(old), len(new)) and old[start] == new[start]:
            start += 1
        end = 0
        while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
            end += 1
        if len(old) - end > start:
            self.beginRemoveRows(QModelIndex(), start, len(old) - end - 1)
            self._entries = old[:start] + old[len(old) - end :]
            self.endRemoveRows()
        if len(new) - end > start:
            self.beginInsertRows(QModelIndex(), start, len(new) - end - 1)
            self._entries = new
            self.endInsertRows()

    def _wanted(self) -> list[Entry]:
        if self._hits is not None:
            return [Entry(Group.FOUND, hit.conversation, hit.snippet, hit.message_id) for hit in self._hits]
        now = self._now()
        grouped: dict[Group, list[Conversation]] = {}
        for conversation in sorted(self._conversations.values(), key=lambda c: (c.updated_at, c.id), reverse=True):
            grouped.setdefault(group_of(conversation, now), []).append(conversation)
        entries: list[Entry] = []
        for group in Group:
            if group in grouped:
                entries.append(Entry(group))
                entries.extend(Entry(group, conversation) for conversation in grouped[group])
        return entries
