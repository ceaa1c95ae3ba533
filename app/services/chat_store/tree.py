"""A conversation's tree: regenerating adds a sibling, editing adds a branch.

Every node with children has exactly one chosen child; the chosen ones from the root form the visible path.

A deleted message keeps its node, and what follows it stays where it is: nothing is moved or copied, so undoing it is
exact.  It is only passed over: its place among the versions of a turn is taken by those of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.services.chat_store.records import Fold, Message


class MessageTree:
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
        self._insert(replace(message, chosen=True))

    def update(self, message: Message) -> None:
        old = self._by_id[message.id]
        self._by_id[message.id] = replace(
            message, parent_id=old.parent_id, pictures=old.pictures, fold=old.fold, deleted_at=old.deleted_at
        )

    def set_fold(self, message_id: str, fold: Fold | None) -> None:
        self._by_id[message_id] = replace(self._by_id[message_id], fold=fold)

    def choose(self, message_id: str) -> list[str]:
        chosen: list[str] = []
        at: str | None = message_id
        while at is not None and (at == message_id or self._by_id[at].deleted_at):
            parent = self._by_id[at].parent_id
            self._chosen[parent] = at
            chosen.append(at)
            at = parent
        return chosen[::-1]

    def delete(self, message_id: str, at: float) -> list[str]:
        """Pass over this message from now on.  Returns the nodes that were chosen because nothing follows it, which
        lead to another version of its turn."""
        versions = self._versions(message_id)
        index = versions.index(message_id)
        self._by_id[message_id] = replace(self._by_id[message_id], deleted_at=at)
        others = versions[:index][::-1] + versions[index + 1 :]
        if others and not self._living(message_id):
            return self.choose(others[0])
        return []

    def restore(self, message_id: str) -> list[str]:
        self._by_id[message_id] = replace(self._by_id[message_id], deleted_at=0.0)
        return self.choose(message_id)

    def remove(self, message_ids: Iterable[str]) -> bool:
        """Take messages out, parents before children; not one if others follow them: then it returns False."""
        gone = list(message_ids)
        if any(id_ not in self._by_id or set(self._children.get(id_, ())) - set(gone) for id_ in gone):
            return False
        for id_ in reversed(gone):
            parent = self._by_id.pop(id_).parent_id
            self._children[parent].remove(id_)
            if self._chosen.get(parent) == id_:
                del self._chosen[parent]
                if self._children[parent]:
                    self._chosen[parent] = self._children[parent][-1]
        return True

    def messages(self) -> list[Message]:
        return [replace(m, chosen=self._chosen[m.parent_id] == m.id) for m in self._by_id.values()]

    def path(self) -> list[Message]:
        return [message for message in self.nodes_after(None) if not message.deleted_at]

    def leaf_id(self) -> str | None:
        path = self.path()
        return path[-1].id if path else None

    def lineage(self, message_id: str) -> list[Message]:
        return [message for message in self.nodes_to(message_id) if not message.deleted_at]

    def nodes_to(self, message_id: str) -> list[Message]:
        nodes: list[Message] = []
        at: str | None = message_id
        while at is not None:
            nodes.append(self._by_id[at])
            at = nodes[-1].parent_id
        return nodes[::-1]

    def nodes_after(self, message_id: str | None) -> list[Message]:
        """What follows this message, or nothing, on the path that is chosen from there, with what was deleted."""
        nodes: list[Message] = []
        at = message_id
        while (following := self._chosen.get(at)) is not None:
            nodes.append(self._by_id[following])
            at = following
        return nodes

    def folded(self, message_id: str | None = None) -> tuple[Message | None, list[Message], list[Message]]:
        """What is sent of the path to this message, or of the visible one: the message whose `fold` stands for the
        earlier turns, if one does; those turns; and the turns that are sent as they are."""
        nodes = self.nodes_after(None) if message_id is None else self.nodes_to(message_id)
        at = next((n for n in range(len(nodes) - 1, -1, -1) if (fold := nodes[n].fold) and fold.is_on), -1)
        earlier, later = ([m for m in part if not m.deleted_at] for part in (nodes[: at + 1], nodes[at + 1 :]))
        return nodes[at] if at >= 0 else None, earlier, later

    def versions(self, message_id: str) -> tuple[int, int]:
        """(number of this version counted from 1, number of versions)."""
        versions = self._versions(message_id)
        return versions.index(message_id) + 1, len(versions)

    def sibling(self, message_id: str, offset: int) -> str | None:
        versions = self._versions(message_id)
        index = versions.index(message_id) + offset
        return versions[index] if 0 <= index < len(versions) else None

    def _versions(self, message_id: str) -> list[str]:
        at = self._by_id[message_id].parent_id
        while at is not None and self._by_id[at].deleted_at:
            at = self._by_id[at].parent_id
        return self._living(at)

    def _living(self, parent_id: str | None) -> list[str]:
        """What follows a message, in the place of those that were deleted what follows them."""
        living: list[str] = []
        waiting = self._children.get(parent_id, [])[::-1]
        while waiting:
            id_ = waiting.pop()
            if self._by_id[id_].deleted_at:
                waiting += self._children.get(id_, [])[::-1]
            else:
                living.append(id_)
        return living


def without_deleted(messages: Iterable[Message]) -> list[Message]:
    """The same tree, in any order that has parents first, without what deleted messages said; those that nothing
    follows are left out."""
    kept: list[Message] = []
    followed: set[str | None] = set()
    for message in reversed(list(messages)):
        if message.deleted_at and message.id not in followed:
            continue
        followed.add(message.parent_id)
        said = replace(message, content="", reasoning="", pictures=(), attachments=(), sources=(), steps=())
        kept.append(said if message.deleted_at else message)
    return kept[::-1]


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
