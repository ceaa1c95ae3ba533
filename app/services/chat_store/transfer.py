"""What an import does to the database: no chat is doubled, and nothing that is there changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.json_format import Whole
from app.services.chat_store.records import Attachment, Conversation, Folder, Message, made_id
from app.services.chat_store.tree import without_deleted
from engine.remote.endpoint import is_remote


@dataclass(frozen=True, slots=True)
class Merged:
    """Chats of a file: new ones, those that have more messages now, and those that were there already.  `folders` are
    new, too."""

    added: tuple[Conversation, ...] = ()
    grown: tuple[Conversation, ...] = ()
    known: tuple[Conversation, ...] = ()
    folders: tuple[Folder, ...] = ()


def merge(database: ChatDatabase, chats: Iterable[Whole], folders: Sequence[Folder] = ()) -> Merged:
    """Adds chats, all or none, with those of a file's `folders` that they lie in.

    One that is there already gets the messages that it lacks, and stays in its folder.  Where a message of it says
    something else by now, the chat of the file becomes one of its own.
    """
    merging = _Merging(database, folders)
    with database.changing():
        for conversation, messages in chats:
            if is_remote(conversation.model):  # a file does not say where text goes: people do
                conversation = replace(conversation, model="")
            merging.take((conversation, messages))
    return Merged(tuple(merging.added), tuple(merging.grown), tuple(merging.known), tuple(merging.made))


@dataclass(slots=True)
class _Merging:
    database: ChatDatabase
    folders: Sequence[Folder]
    added: list[Conversation] = field(default_factory=list)
    grown: list[Conversation] = field(default_factory=list)
    known: list[Conversation] = field(default_factory=list)
    made: list[Folder] = field(default_factory=list)

    def take(self, chat: Whole) -> None:
        conversation, messages = chat
        database = self.database
        database.forget_deleted(conversation.id)
        there = database.conversation(conversation.id)
        if there is None and database.is_taken(conversation.id, messages):
            self.take(_copy(chat, "elsewhere"))
            return
        if there is None:
            conversation = replace(conversation, folder_id=self._place(conversation.folder_id))
            database.add_whole(conversation, messages)
            self.added.append(conversation)
            return
        old = {message.id: message for message in database.messages(conversation.id)}
        if any(message.id in old and _differ(old[message.id], message) for message in messages):
            says = [part for message in messages for part in (message.id, *_said(message))]
            self.take(_copy(chat, *says))
            return
        new = _lacking(old.values(), messages)
        if not new:
            self.known.append(there)
            return
        now = replace(there, updated_at=max(there.updated_at, conversation.updated_at))
        database.grow(now, new)
        self.grown.append(now)

    def _place(self, folder_id: str) -> str:
        """The folder here for one of the file: the same, else one of that name, else a new one; or none."""
        here = self.database.folders()
        if any(folder.id == folder_id for folder in here):
            return folder_id
        brought = next((folder for folder in self.folders if folder.id == folder_id), None)
        if brought is None:
            return ""
        named = next((folder for folder in here if folder.name == brought.name), None)
        if named is None:
            self.database.add_folder(brought)
            self.made.append(brought)
        return (named or brought).id


def _differ(old: Message, new: Message) -> bool:
    """Whether they say different things; one that was deleted says nothing."""
    return not (old.deleted_at or new.deleted_at) and _said(old) != _said(new)


def _said(message: Message) -> tuple[str, str, str]:
    return message.role, message.content, message.reasoning


def _lacking(old: Iterable[Message], messages: Sequence[Message]) -> list[Message]:
    """The messages that are new; none takes the place of a version that is shown."""
    ids = {message.id for message in old}
    shown = {message.parent_id for message in old if message.chosen}
    return [
        replace(message, chosen=message.chosen and message.parent_id not in shown)
        for message in messages
        if message.id not in ids
    ]


def _copy(chat: Whole, *because: str) -> Whole:
    """The chat under other ids, which are the same whenever the same file is imported."""
    conversation, messages = chat
    id_ = made_id("copy", conversation.id, *because)
    fresh = {message.id: made_id(id_, message.id) for message in messages}
    documents = {one.id: made_id(id_, one.id) for message in messages for one in message.attachments}
    return replace(conversation, id=id_), [
        replace(
            message,
            id=fresh[message.id],
            conversation_id=id_,
            parent_id=None if message.parent_id is None else fresh[message.parent_id],
            attachments=tuple(replace(one, id=documents[one.id]) for one in message.attachments),
            sources=tuple(
                replace(one, attachment=documents.get(one.attachment, one.attachment)) for one in message.sources
            ),
        )
        for message in messages
    ]


def to_export(database: ChatDatabase, conversation_id: str) -> tuple[Message, ...]:
    """The messages without what was deleted, with the texts of their documents, each once, and not with where those
    lie on this PC."""
    told: set[str] = set()
    messages: list[Message] = []
    for message in without_deleted(database.messages(conversation_id)):
        attachments: list[Attachment] = []
        for one in message.attachments:
            parts = database.document_parts(one.id) if one.id not in told else ()
            attachments.append(replace(one, path="", parts=parts))
            told.add(one.id)
        messages.append(replace(message, attachments=tuple(attachments)))
    return tuple(messages)
