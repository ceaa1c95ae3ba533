"""The conversation on screen: the visible path of its tree, one row per turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.services.chat_store import Conversation, Message, MessageTree
from engine.common.chat import Picture

ROW_ROLE = Qt.ItemDataRole.UserRole + 1

Index = QModelIndex | QPersistentModelIndex


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One turn as shown: the message, which is version `version` of `versions`, counted from 1."""

    message: Message
    version: int = 1
    versions: int = 1


class ConversationModel(QAbstractListModel):
    """Rows of one conversation.  `ROW_ROLE` gives a `MessageRow`; independent of the store and the engine."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._conversation: Conversation | None = None
        self._tree = MessageTree()
        self._rows: list[MessageRow] = []
        self._numbers: dict[str, int] = {}
        """Of rows, by the ids of their messages."""
        self._pictures: tuple[Picture, ...] | None = None
        """Found when they are asked for."""

    @property
    def conversation(self) -> Conversation | None:
        return self._conversation

    @property
    def tree(self) -> MessageTree:
        return self._tree

    @property
    def rows(self) -> tuple[MessageRow, ...]:
        return tuple(self._rows)

    @property
    def last(self) -> Message | None:
        """The end of the visible path."""
        return self._rows[-1].message if self._rows else None

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Those of the visible path."""
        if self._pictures is None:
            self._pictures = tuple(picture for row in self._rows for picture in row.message.pictures)
        return self._pictures

    def row(self, number: int) -> MessageRow:
        """The turn at a place, from 0."""
        return self._rows[number]

    def rowCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self._rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        row = self._rows[index.row()]
        if role == ROW_ROLE:
            return row
        return row.message.content if role == Qt.ItemDataRole.DisplayRole else None

    def show(self, conversation: Conversation, tree: MessageTree) -> None:
        """Show another conversation.  The tree is shared, not copied."""
        self.beginResetModel()
        self._conversation = conversation
        self._tree = tree
        self._rows = self._visible()
        self._note_rows()
        self.endResetModel()

    def set_conversation(self, conversation: Conversation) -> None:
        """Update the fields of the same conversation."""
        self._conversation = conversation

    def add(self, message: Message) -> None:
        """Put a new message on the visible path."""
        self._tree.add(message)
        self._follow_tree()

    def update(self, message: Message) -> None:
        """Update a message's text, state and stats; its pictures stay."""
        self._tree.update(message)
        number = self.row_of(message.id)
        if number is not None:
            self._rows[number] = replace(self._rows[number], message=self._tree[message.id])
            self.dataChanged.emit(self.index(number), self.index(number))

    def choose(self, message_id: str) -> None:
        """Show this version and the turns that follow it."""
        self._tree.choose(message_id)
        self._follow_tree()

    def row_of(self, message_id: str) -> int | None:
        """A message's row; None if it is not on the visible path."""
        return self._numbers.get(message_id)

    def _visible(self) -> list[MessageRow]:
        return [MessageRow(message, *self._tree.versions(message.id)) for message in self._tree.path()]

    def _follow_tree(self) -> None:
        """Emit only the difference: rows that still show the same turn stay, the others are replaced."""
        new = self._visible()
        same = 0
        for old_row, new_row in zip(self._rows, new, strict=False):
            if old_row.message.id != new_row.message.id:
                break
            same += 1
        if same < len(self._rows):
            self.beginRemoveRows(QModelIndex(), same, len(self._rows) - 1)
            del self._rows[same:]
            self._note_rows()
            self.endRemoveRows()
        for number in range(same):
            if self._rows[number] != new[number]:
                self._rows[number] = new[number]
                self.dataChanged.emit(self.index(number), self.index(number))
        if len(new) > same:
            self.beginInsertRows(QModelIndex(), same, len(new) - 1)
            self._rows.extend(new[same:])
            self._note_rows()
            self.endInsertRows()

    def _note_rows(self) -> None:
        self._numbers = {row.message.id: number for number, row in enumerate(self._rows)}
        self._pictures = None
