"""A conversation's tree: regenerating adds a sibling, editing adds a branch.

Every node with children has exactly one chosen child; the chosen ones from the root form the visible path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.services.chat_store.records import Message


class MessageTree:
    """Messages of one conversation, in insertion order."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._by_id: dict[str, Message] = {}
        self._children: dict[str | None, list[str]] = {}
        self._chosen: dict[str | None, str] = {}
        for message in messages:
            self._insert(message)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._by_id

    def __getitem__(self, message_id: str) -> Message:
        return self._by_id[message_id]

    def _insert(self, message: Message) -> None:
        if message.id in self._by_id:
            raise ValueError(f"message {message.id} is already in the tree")
        if message.parent_id is not None and message.parent_id not in self._by_id:
            raise ValueError(f"the parent of message {message.id} is not in the tree")
        self._by_id[message.id] = message
        self._children.setdefault(message.parent_id, []).append(message.id)
        if message.chosen or message.parent_id not in self._chosen:
            self._chosen[message.parent_id] = message.id

    def add(self, message: Message) -> None:
        """Insert a new message under its parent and choose it among its siblings."""
        self._insert(replace(message, chosen=True))

    def update(self, message: Message) -> None:
        """Replace a message's text, state and stats; its place stays."""
        old = self._by_id[message.id]
        self._by_id[message.id] = replace(message, parent_id=old.parent_id)

    def choose(self, message_id: str) -> None:
        """Show this message instead of its siblings."""
        self._chosen[self._by_id[message_id].parent_id] = message_id

    def messages(self) -> list[Message]:
        """All messages, parents before children, with the current `chosen`."""
        return [replace(m, chosen=self._chosen[m.parent_id] == m.id) for m in self._by_id.values()]

    def path(self) -> list[Message]:
        """The visible path, first turn first."""
        path: list[Message] = []
        at: str | None = None
        while (following := self._chosen.get(at)) is not None:
            path.append(self._by_id[following])
            at = following
        return path

    def leaf_id(self) -> str | None:
        """The last message of the visible path."""
        path = self.path()
        return path[-1].id if path else None

    def lineage(self, message_id: str) -> list[Message]:
        """The path from the first turn to this message, inclusive."""
        lineage: list[Message] = []
        at: str | None = message_id
        while at is not None:
            lineage.append(self._by_id[at])
            at = lineage[-1].parent_id
        return lineage[::-1]

    def versions(self, message_id: str) -> tuple[int, int]:
        """(number of this version counted from 1, number of versions)."""
        siblings = self._children[self._by_id[message_id].parent_id]
        return siblings.index(message_id) + 1, len(siblings)

    def sibling(self, message_id: str, offset: int) -> str | None:
        """The version `offset` places further, if there is one."""
        siblings = self._children[self._by_id[message_id].parent_id]
        index = siblings.index(message_id) + offset
        return siblings[index] if 0 <= index < len(siblings) else None


def sound(messages: Iterable[Message]) -> list[Message]:
    """Turn the messages of a damaged or foreign file into a valid tree.

    Parents come first; a message whose parent is missing (or is its own descendant) becomes a first turn; of two with
    one id the second is dropped; exactly one sibling of each group is chosen.
    """
    by_id: dict[str, Message] = {}
    for message in messages:
        by_id.setdefault(message.id, message)
    ordered: dict[str, Message] = {}
    for start in by_id.values():
        chain: list[Message] = []
        walked: set[str] = set()
        at: Message | None = start
        while at is not None and at.id not in ordered and at.id not in walked:
            walked.add(at.id)
            chain.append(at)
            at = by_id.get(at.parent_id) if at.parent_id is not None else None
        for message in reversed(chain):
            if message.parent_id is not None and message.parent_id not in ordered:
                message = replace(message, parent_id=None)
            ordered[message.id] = message
    return MessageTree(ordered.values()).messages()
