"""The list of conversations: grouped by last use, or the results of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Any

from PySide6.QtCore import QAbstractListModel, QMimeData, QModelIndex, QObject, QPersistentModelIndex, Qt, Signal

from app.services.chat_store import Conversation, Folder, SearchHit

ENTRY_ROLE = Qt.ItemDataRole.UserRole + 1
DRAGGED = "application/x-switchyard-chats"
"""Ids of conversations, one a line."""

Index = QModelIndex | QPersistentModelIndex


class Group(Enum):
    SCRATCH = "scratch"
    PINNED = "pinned"
    FOLDER = "folder"
    TODAY = "today"
    YESTERDAY = "yesterday"
    WEEK = "week"
    OLDER = "older"
    FOUND = "found"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: a heading (`conversation` is None) or a conversation, with a snippet if a search found it.

    Attributes:
        folder: of a folder's own line, which holds `chats` conversations, and of those below it.
    """

    group: Group
    conversation: Conversation | None = None
    snippet: str = ""
    message_id: str | None = None
    folder: Folder | None = None
    chats: int = 0


def group_of(conversation: Conversation, now: datetime) -> Group:
    if conversation.pinned:
        return Group.PINNED
    days = (now.date() - datetime.fromtimestamp(conversation.updated_at).date()).days
    if days <= 0:
        return Group.TODAY
    if days == 1:
        return Group.YESTERDAY
    return Group.WEEK if days <= 7 else Group.OLDER


class ConversationListModel(QAbstractListModel):
    """Headings, folders and conversations in one list; `ENTRY_ROLE` gives an `Entry`.

    Args:
        group_title: the text of a heading, in the user's language.
        untitled: the title shown for a conversation that has none.
        now: the clock.
        is_scratch: whether nothing of a conversation, given by its id, is stored.

    Signals: `dropped`, conversations' ids and the folder that they were dragged to, or "".
    """

    dropped = Signal(list, str)

    def __init__(
        self,
        group_title: Callable[[Group], str],
        untitled: str,
        now: Callable[[], datetime] = datetime.now,
        is_scratch: Callable[[str], bool] = lambda _: False,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._group_title = group_title
        self._untitled = untitled
        self._now = now
        self.is_scratch = is_scratch
        self._folders: dict[str, Folder] = {}
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
                return entry.folder.name if entry.folder is not None else self._group_title(entry.group)
            return entry.conversation.title or ("" if role == Qt.ItemDataRole.EditRole else self._untitled)
        if role == Qt.ItemDataRole.ToolTipRole and entry.conversation is not None:
            return entry.conversation.title or None
        return None

    def flags(self, index: Index) -> Qt.ItemFlag:
        drops = Qt.ItemFlag.ItemIsDropEnabled
        if not index.isValid():
            return drops
        entry = self._entries[index.row()]
        if entry.conversation is None and entry.folder is None:
            return drops
        usable = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable | Qt.ItemFlag.ItemIsEditable
        return usable | drops | (Qt.ItemFlag.ItemIsDragEnabled if self._moves(entry) else Qt.ItemFlag.NoItemFlags)

    # --- folders ---

    @property
    def folders(self) -> tuple[Folder, ...]:
        return tuple(sorted(self._folders.values(), key=lambda folder: (folder.name.casefold(), folder.id)))

    def folder(self, folder_id: str) -> Folder | None:
        return self._folders.get(folder_id)

    def in_folder(self, folder_id: str) -> tuple[Conversation, ...]:
        return tuple(each for each in self._conversations.values() if each.folder_id == folder_id)

    def set_folders(self, folders: Iterable[Folder]) -> None:
        self._folders = {folder.id: folder for folder in folders}
        self._rebuild()

    def put_folder(self, folder: Folder) -> None:
        self._folders[folder.id] = folder
        self._rebuild()

    def remove_folder(self, folder_id: str) -> None:
        """Remove a folder; what lies in it is shown as if it lay in none."""
        self._folders.pop(folder_id, None)
        self._rebuild()

    def row_of_folder(self, folder_id: str) -> int | None:
        for number, entry in enumerate(self._entries):
            if entry.conversation is None and entry.folder is not None and entry.folder.id == folder_id:
                return number
        return None

    def _moves(self, entry: Entry) -> bool:
        return entry.conversation is not None and not self.is_scratch(entry.conversation.id)

    def mimeTypes(self) -> list[str]:
        return [DRAGGED]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:
        entries = (self._entries[index.row()] for index in indexes)
        data = QMimeData()
        ids = [entry.conversation.id for entry in entries if entry.conversation is not None and self._moves(entry)]
        data.setData(DRAGGED, "\n".join(ids).encode())
        return data

    def supportedDropActions(self) -> Qt.DropAction:
        return Qt.DropAction.MoveAction

    def canDropMimeData(self, data: QMimeData, _action: Qt.DropAction, _row: int, _column: int, _at: Index) -> bool:
        return self._hits is None and data.hasFormat(DRAGGED)

    def dropMimeData(self, data: QMimeData, _action: Qt.DropAction, row: int, _column: int, parent: Index) -> bool:
        """Says where it was dropped; whoever hears it moves it.  Always False, or the view would remove the rows."""
        ids = bytes(data.data(DRAGGED).data()).decode().split("\n")
        at = parent.row() if parent.isValid() else min(row, len(self._entries)) - 1
        folder = self._entries[at].folder if 0 <= at < len(self._entries) else None
        self.dropped.emit(ids, folder.id if folder is not None else "")
        return False

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def conversation(self, conversation_id: str) -> Conversation | None:
        return self._conversations.get(conversation_id)

    @property
    def known(self) -> tuple[Conversation, ...]:
        """All of them, also those that are never stored."""
        return tuple(self._conversations.values())

    @property
    def kept(self) -> tuple[Conversation, ...]:
        return tuple(each for each in self.known if not self.is_scratch(each.id))

    def first(self) -> Conversation | None:
        return next((entry.conversation for entry in self._entries if entry.conversation is not None), None)

    def row_of(self, conversation_id: str) -> int | None:
        for number, entry in enumerate(self._entries):
            if entry.conversation is not None and entry.conversation.id == conversation_id:
                return number
        return None

    def snippet_of(self, message_id: str) -> str:
        return next((entry.snippet for entry in self._entries if entry.message_id == message_id), "")

    def set_conversations(self, conversations: Iterable[Conversation]) -> None:
        self._conversations = {conversation.id: conversation for conversation in conversations}
        self._rebuild()

    def put(self, conversation: Conversation) -> None:
        old = self._conversations.get(conversation.id)
        self._conversations[conversation.id] = conversation
        if self._hits is not None:
            self._hits = tuple(
                replace(hit, conversation=conversation) if hit.conversation.id == conversation.id else hit
                for hit in self._hits
            )
        row = self.row_of(conversation.id)
        unmoved = old is not None and _place(old) == _place(conversation)
        if unmoved and row is not None:
            self._entries[row] = replace(self._entries[row], conversation=conversation)
            self.dataChanged.emit(self.index(row), self.index(row))
        else:
            self._rebuild()

    def put_all(self, conversations: Iterable[Conversation]) -> None:
        self._conversations.update({conversation.id: conversation for conversation in conversations})
        self._rebuild()

    def remove(self, conversation_id: str) -> None:
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
        if [_key(entry) for entry in new] == [_key(entry) for entry in self._entries]:
            old, self._entries = self._entries, new
            for row, (before, after) in enumerate(zip(old, new, strict=True)):
                if before != after:
                    self.dataChanged.emit(self.index(row), self.index(row))
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
        foldered: dict[str, list[Conversation]] = {}
        for conversation in sorted(self._conversations.values(), key=lambda c: (c.updated_at, c.id), reverse=True):
            if self.is_scratch(conversation.id):
                grouped.setdefault(Group.SCRATCH, []).append(conversation)
            elif conversation.folder_id in self._folders:
                foldered.setdefault(conversation.folder_id, []).append(conversation)
            else:
                grouped.setdefault(group_of(conversation, now), []).append(conversation)
        entries: list[Entry] = []
        for group in Group:
            if group in grouped:
                entries.append(Entry(group))
                entries.extend(Entry(group, conversation) for conversation in grouped[group])
            if group is Group.FOLDER and self._folders:
                entries.append(Entry(group))
                for folder in self.folders:
                    inside = sorted(foldered.get(folder.id, ()), key=lambda c: not c.pinned)
                    entries.append(Entry(group, folder=folder, chats=len(inside)))
                    if folder.is_open:
                        entries.extend(Entry(group, conversation, folder=folder) for conversation in inside)
        return entries


def _key(entry: Entry) -> tuple[Group, str, str]:
    conversation, folder = entry.conversation, entry.folder
    return entry.group, conversation.id if conversation is not None else "", folder.id if folder is not None else ""


def _place(conversation: Conversation) -> tuple[float, bool, str]:
    return conversation.updated_at, conversation.pinned, conversation.folder_id
