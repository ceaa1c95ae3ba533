"""Export to and import from a file, on the store's thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.json_format import NotAChatFileError, Whole, folders_in, from_json, to_json
from app.services.chat_store.markdown_format import from_markdown, to_markdown
from app.services.chat_store.records import Attachment, Conversation, Folder, Message, new_id
from app.services.chat_store.tree import MessageTree, without_deleted
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import write_whole
from engine.common.foreign import read_foreign, reason

LARGEST_IMPORT = 256 * 2**20
"""Bytes; a larger file is not a chat that a person wrote."""


def export_chats(database: ChatDatabase, conversation_ids: Sequence[str], path: Path) -> None:
    """Write chats to `path`: Markdown if it ends in .md or .markdown, else JSON.

    Raises:
        EngineError: the file cannot be written; an existing one is untouched.
    """
    chats = [
        (conversation, without_deleted(_with_documents(database, conversation.id)))
        for id_ in conversation_ids
        if (conversation := database.conversation(id_)) is not None
    ]
    if path.suffix.lower() in (".md", ".markdown"):
        text = "\n".join(to_markdown(conversation, MessageTree(messages).path()) for conversation, messages in chats)
    else:
        used = {conversation.folder_id for conversation, _ in chats}
        text = to_json(chats, [folder for folder in database.folders() if folder.id in used])
    try:
        write_whole(path, text)
    except OSError as error:
        why = error.strerror or str(error)
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"The chat could not be written to {path} ({why}): choose another place."
        ) from error


def _with_documents(database: ChatDatabase, conversation_id: str) -> list[Message]:
    """The messages with the texts of their documents, each once, and not with where those lie on this PC."""
    told: set[str] = set()
    messages: list[Message] = []
    for message in database.messages(conversation_id):
        attachments: list[Attachment] = []
        for one in message.attachments:
            parts = database.document_parts(one.id) if one.id not in told else ()
            attachments.append(replace(one, path="", parts=parts))
            told.add(one.id)
        messages.append(replace(message, attachments=tuple(attachments)))
    return messages


def import_chats(database: ChatDatabase, path: Path) -> tuple[Conversation, ...]:
    """Add the chats of an exported file, as copies where they already exist.

    Raises:
        EngineError: the file cannot be read or holds no chats; nothing is added.
    """
    try:
        text = read_foreign(path, LARGEST_IMPORT).decode("utf-8-sig")
        markdown = path.suffix.lower() in (".md", ".markdown", ".txt")
        chats = [from_markdown(text)] if markdown else from_json(text)
    except UnicodeDecodeError as error:
        raise _not_imported(path, "it is not text in UTF-8") from error
    except NotAChatFileError as error:
        raise _not_imported(path, str(error)) from error
    except OSError as error:
        raise _not_imported(path, reason(error)) from error
    places = _places(database, [] if markdown else folders_in(text))
    fresh = [_as_new(database, _placed(chat, places)) for chat in chats]
    try:
        database.add_conversations(fresh)
    except sqlite3.IntegrityError as error:
        raise _not_imported(path, "two entries in it have the same id") from error
    return tuple(conversation for conversation, _ in fresh)


def _places(database: ChatDatabase, brought: Sequence[Folder]) -> dict[str, str]:
    """The folder here for each folder of a file: the same, else one of that name, else a new one."""
    known = {folder.id: folder.id for folder in database.folders()}
    named = {folder.name: folder.id for folder in database.folders()}
    for folder in brought:
        if folder.id not in known:
            if folder.name not in named:
                database.put_folder(folder)
                named[folder.name] = folder.id
            known[folder.id] = named[folder.name]
    return known


def _placed(chat: Whole, places: Mapping[str, str]) -> Whole:
    conversation, messages = chat
    return replace(conversation, folder_id=places.get(conversation.folder_id, "")), messages


def _not_imported(path: Path, why: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, f"{path.name} was not imported: {why}.")


def _as_new(database: ChatDatabase, chat: Whole) -> Whole:
    """The chat under free ids: its own where possible, so that an export restores as it was."""
    conversation, messages = chat
    if not database.is_taken(conversation.id, messages):
        return chat
    fresh = {message.id: new_id() for message in messages}
    documents = {one.id: new_id() for message in messages for one in message.attachments}
    conversation = replace(conversation, id=new_id())
    return conversation, [
        replace(
            message,
            id=fresh[message.id],
            conversation_id=conversation.id,
            parent_id=None if message.parent_id is None else fresh[message.parent_id],
            attachments=tuple(replace(one, id=documents[one.id]) for one in message.attachments),
            sources=tuple(
                replace(one, attachment=documents.get(one.attachment, one.attachment)) for one in message.sources
            ),
        )
        for message in messages
    ]
