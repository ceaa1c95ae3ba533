"""The conversation on screen: the visible path of its tree, one row per turn, and how full its context is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from app.services.chat_store import Conversation, Fold, Message, MessageTree
from app.services.chat_store.records import digest_of
from engine.common.chat import Picture

NEAR_SHARE, FULL_SHARE = 0.75, 0.9
KEPT_SHARE = 0.5
"""Of the context, that turns which stay as they are may take after folding."""


class Level(Enum):
    FREE = "free"
    NEAR = "near"
    FULL = "full"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class ContextUse:
    used: int
    limit: int
    is_about: bool = True

    @property
    def share(self) -> float:
        return self.used / max(self.limit, 1)

    @property
    def level(self) -> Level:
        if self.used >= self.limit:
            return Level.OVER
        return Level.FULL if self.share >= FULL_SHARE else Level.NEAR if self.share >= NEAR_SHARE else Level.FREE


def turns_to_fold(tokens: Sequence[int], ends: Sequence[bool], room: int) -> int:
    """How many of the first turns to fold, so that at most `room` tokens of turns are left; 0 if none can be.

    Args:
        tokens: of each turn.
        ends: whether a turn is an answer, after which a question can follow.
    """
    left, last = sum(tokens), 0
    for number, (size, is_end) in enumerate(zip(tokens, ends, strict=True), 1):
        left -= size
        if is_end:
            last = number
            if left <= room:
                break
    return last


ROW_ROLE = Qt.ItemDataRole.UserRole + 1

Index = QModelIndex | QPersistentModelIndex


@dataclass(frozen=True, slots=True)
class FoldCard:
    """What is sent instead of the first `turns` turns."""

    fold: Fold
    turns: int
    is_open: bool = False
    is_outdated: bool = False


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One turn as shown: the message, which is version `version` of `versions`, counted from 1."""

    message: Message
    version: int = 1
    versions: int = 1
    card: FoldCard | None = None
    is_folded: bool = False

    @property
    def key(self) -> tuple[str, bool]:
        return self.message.id, self.card is not None


class ConversationModel(QAbstractListModel):
    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.conversation: Conversation | None = None
        self._tree = MessageTree()
        self._rows: list[MessageRow] = []
        self._numbers: dict[str, int] = {}
        self._pictures: tuple[Picture, ...] | None = None
        self.shows_folded = False

    @property
    def tree(self) -> MessageTree:
        return self._tree

    @property
    def rows(self) -> tuple[MessageRow, ...]:
        return tuple(self._rows)

    @property
    def last(self) -> Message | None:
        if self._rows and self._rows[-1].card is not None:
            path = self._tree.path()
            return path[-1] if path else None
        return self._rows[-1].message if self._rows else None

    @property
    def pictures(self) -> tuple[Picture, ...]:
        if self._pictures is None:
            sent = (row for row in self._rows if row.card is None and not row.is_folded)
            self._pictures = tuple(picture for row in sent for picture in row.message.pictures)
        return self._pictures

    def row(self, number: int) -> MessageRow:
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
        self.conversation = conversation
        self._tree = tree
        self.shows_folded = False
        self._rows = self._visible()
        self._note_rows()
        self.endResetModel()

    def set_conversation(self, conversation: Conversation) -> None:
        self.conversation = conversation

    def add(self, message: Message) -> None:
        self._tree.add(message)
        self.refresh()

    def add_all(self, messages: Iterable[Message]) -> None:
        """The same for several, parents before children."""
        for message in messages:
            self._tree.add(message)
        self.refresh()

    def update(self, message: Message) -> None:
        self._tree.update(message)
        number = self.row_of(message.id)
        if number is not None:
            self._rows[number] = replace(self._rows[number], message=self._tree[message.id])
            self.dataChanged.emit(self.index(number), self.index(number))

    def choose(self, message_id: str) -> list[str]:
        """Show this version and the turns that follow it; returns the nodes of the tree that lead there."""
        chosen = self._tree.choose(message_id)
        self.refresh()
        return chosen

    def show_folded(self, shown: bool) -> None:
        if shown != self.shows_folded:
            self.shows_folded = shown
            self.refresh()

    def row_of(self, message_id: str) -> int | None:
        return self._numbers.get(message_id)

    def _visible(self) -> list[MessageRow]:
        at, earlier, later = self._tree.folded()
        rows = [MessageRow(message, *self._tree.versions(message.id)) for message in later]
        if at is None or at.fold is None:
            return rows
        turns = [replace(MessageRow(m, *self._tree.versions(m.id)), is_folded=True) for m in earlier]
        outdated = bool(at.fold.summary) and at.fold.turns != digest_of(earlier)
        card = MessageRow(at, card=FoldCard(at.fold, len(turns), self.shows_folded, outdated))
        return [card, *(turns if self.shows_folded else ()), *rows]

    def refresh(self) -> None:
        """Follow the tree.  Emits only the difference: rows that still show the same turn stay."""
        new, old = self._visible(), self._rows
        same = 0
        while same < min(len(old), len(new)) and old[same].key == new[same].key:
            same += 1
        end = 0
        while end < min(len(old), len(new)) - same and old[-1 - end].key == new[-1 - end].key:
            end += 1
        if len(old) - end > same:
            self.beginRemoveRows(QModelIndex(), same, len(old) - end - 1)
            self._rows = old[:same] + old[len(old) - end :]
            self._note_rows()
            self.endRemoveRows()
        if len(new) - end > same:
            self.beginInsertRows(QModelIndex(), same, len(new) - end - 1)
            self._rows[same:same] = new[same : len(new) - end]
            self._note_rows()
            self.endInsertRows()
        for number, row in enumerate(new):
            if self._rows[number] != row:
                self._rows[number] = row
                self.dataChanged.emit(self.index(number), self.index(number))
        self._note_rows()

    def _note_rows(self) -> None:
        self._numbers = {row.message.id: number for number, row in enumerate(self._rows) if row.card is None}
        self._pictures = None
