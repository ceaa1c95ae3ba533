"""Chats into files and out of them, off the window's thread: with progress, and cancelled at any chat.

A format is a suffix and a function that writes one chat; `.zip` is all chats, each as Markdown to read and as JSON to
import again.
"""

from __future__ import annotations

import re
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from PySide6.QtCore import QCoreApplication, QObject, Qt, Signal

from app.services.background import TaskQueue, sentence_of
from app.services.chat_store import ChatStore, Conversation, Folder, Message, MessageTree
from app.services.chat_store.database import ChatDatabase
from app.services.chat_store.json_format import Merged, Whole, merge, to_export, to_json, to_markdown
from app.services.chat_store.reading import Unread, read_chats
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.common.files import NewFile, write_whole

translate = QCoreApplication.translate

T = TypeVar("T")

Writer = Callable[[Conversation, Sequence[Message], Path, CancelCheck], object]
"""Writes one chat, all of whose messages are given, to a file that is not there yet; or raises RequestCancelled."""

TOLD_S = 0.1
"""How often progress is told."""
_POLL_S = 0.05
_MOST_AT_ONCE = 50
_MOST_CHARACTERS_AT_ONCE = 4_000_000
_NO_NAME = re.compile(r'[\\/:*?"<>|\x00-\x1f\x7f]+')


@dataclass(slots=True)
class ImportReport:
    """What became of an import."""

    added: int = 0
    grown: int = 0
    known: int = 0
    messages: int = 0
    first: Conversation | None = None
    unread: Unread = field(default_factory=Unread)
    is_cancelled: bool = False

    def note(self, merged: Merged) -> None:
        self.added += len(merged.added)
        self.grown += len(merged.grown)
        self.known += len(merged.known)
        self.first = self.first or next(iter((*merged.added, *merged.grown, *merged.known)), None)


class ChatFiles(QObject):
    """One import or export at a time; others wait.

    Signals, all on this object's thread:
        progressed: the share that is done, and how many chats.
        merged: `Merged`, as an import goes on.
        imported: `ImportReport`, at its end.
        exported: path of the written file.
        failed: one sentence; also that an export was cancelled.
    """

    progressed = Signal(float, int)
    merged = Signal(object)
    imported = Signal(object)
    exported = Signal(str)
    failed = Signal(str)

    _told = Signal(object)

    def __init__(
        self, store: ChatStore, writers: Mapping[str, Writer] | None = None, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._store = store
        self._writers: dict[str, Writer] = {".md": _write_markdown, **(writers or {})}
        self._doing = TaskQueue(self)
        self._cancel = threading.Event()
        self._told_at = 0.0
        self._told.connect(lambda call: call(), Qt.ConnectionType.QueuedConnection)

    @property
    def is_busy(self) -> bool:
        return self._doing.is_busy

    def import_files(self, paths: Sequence[Path]) -> None:
        some, cancel = tuple(paths), self._begin()
        self._doing.add(lambda: self._import(some, cancel.is_set), self.imported.emit, self._on_failed)

    def export(self, conversation_ids: Sequence[str], path: Path) -> None:
        ids, cancel = tuple(conversation_ids), self._begin()
        self._doing.add(lambda: self._export(ids, path, cancel.is_set), self.exported.emit, self._on_failed)

    def with_chat(
        self, conversation_id: str, do: Callable[[Conversation, Sequence[Message], CancelCheck], object]
    ) -> None:
        cancel = self._begin()

        def run() -> None:
            chat = self._chat(conversation_id, cancel.is_set)
            if chat is not None:
                do(chat.conversation, chat.messages, cancel.is_set)

        self._doing.add(run, failed=self._on_failed)

    def cancel(self) -> None:
        self._cancel.set()

    def close(self) -> None:
        self.cancel()
        self._doing.close()

    def _begin(self) -> threading.Event:
        if not self._doing.is_busy:
            self._cancel = threading.Event()
        return self._cancel

    def _on_failed(self, error: Exception) -> None:
        if isinstance(error, RequestCancelled):
            self.failed.emit(translate("ChatFiles", "The export was cancelled; no file was written."))
        else:
            self.failed.emit(sentence_of(error))

    # --- on the thread ---

    def _tell(self, share: float, count: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= TOLD_S:
            self._told_at = now
            self._told.emit(lambda: self.progressed.emit(share, count))

    def _wait(self, future: Future[T], cancelled: CancelCheck) -> T:
        while True:
            try:
                return future.result(_POLL_S)
            except NotYet:
                if cancelled():
                    raise RequestCancelled from None

    def _chat(self, id_: str, cancelled: CancelCheck) -> _Chat | None:
        return self._wait(self._store.ask(lambda database: _exported(database, id_)), cancelled)

    def _import(self, paths: Sequence[Path], cancelled: CancelCheck) -> ImportReport:
        report = ImportReport()
        share = [0.0]
        folders: list[Folder] = []

        def progressed(done: float) -> None:
            share[0] = done
            self._tell(done, report.added + report.grown + report.known)

        def keep(chats: list[Whole]) -> None:
            adding = self._store.ask(lambda database: merge(database, chats, folders), writes=True)
            merged = self._wait(adding, cancelled)
            report.note(merged)
            report.messages += sum(len(messages) for _, messages in chats)
            self._told.emit(lambda: self.merged.emit(merged))
            self._tell(share[0], report.added + report.grown + report.known)

        try:
            with closing(read_chats(paths, report.unread, progressed, cancelled, folders)) as chats:  # type: ignore[type-var]
                for some in _batches(chats):
                    keep(some)
        except RequestCancelled:
            pass
        report.is_cancelled = cancelled()
        return report

    def _export(self, ids: Sequence[str], path: Path, cancelled: CancelCheck) -> str:
        try:
            if path.suffix.lower() == ".zip":
                self._write_all(ids, path, cancelled)
            else:
                chat, writer = self._chat(ids[0], cancelled), self._writers.get(path.suffix.lower())
                if chat is not None and writer is not None:
                    writer(chat.conversation, chat.messages, path, cancelled)
                elif chat is not None:
                    write_whole(path, chat.as_json())
        except OSError as error:
            why = error.strerror or str(error)
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"The chat could not be written to {path} ({why}): choose another place."
            ) from error
        return str(path)

    def _write_all(self, ids: Sequence[str], path: Path, cancelled: CancelCheck) -> None:
        names: Counter[str] = Counter()
        with NewFile(path) as new:
            with zipfile.ZipFile(new.path, "w", zipfile.ZIP_DEFLATED) as archive:
                for number, id_ in enumerate(ids):
                    chat = self._chat(id_, cancelled)
                    if cancelled():
                        raise RequestCancelled
                    self._tell(number / len(ids), number)
                    if chat is None:
                        continue
                    name = _free(file_name(chat.conversation), names)
                    archive.writestr(f"JSON/{name}.json", chat.as_json())
                    archive.writestr(f"Markdown/{name}.md", chat.as_markdown())
            new.take_place()


def file_name(conversation: Conversation) -> str:
    day = time.strftime("%Y-%m-%d ", time.localtime(conversation.created_at)) if conversation.created_at else ""
    title = _NO_NAME.sub("-", conversation.title).strip(". ")[:60].strip(". ")
    return f"{day}{title or translate('ChatFiles', 'Chat')}"


def _free(name: str, taken: Counter[str]) -> str:
    """The name, numbered where another chat is called so, also for systems that take A and a for the same."""
    taken[name.casefold()] += 1
    count = taken[name.casefold()]
    return name if count == 1 else _free(f"{name} ({count})", taken)


def _batches(chats: Iterator[Whole]) -> Iterator[list[Whole]]:
    batch: list[Whole] = []
    characters = 0
    for chat in chats:
        batch.append(chat)
        characters += sum(len(m.content) + sum(len(p.data) for p in m.pictures) for m in chat[1])
        if len(batch) == _MOST_AT_ONCE or characters > _MOST_CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Chat:
    conversation: Conversation
    messages: tuple[Message, ...]
    folders: tuple[Folder, ...]

    def as_json(self) -> str:
        return to_json([(self.conversation, self.messages)], self.folders)

    def as_markdown(self) -> str:
        return to_markdown(self.conversation, MessageTree(self.messages).path())


def _exported(database: ChatDatabase, conversation_id: str) -> _Chat | None:
    conversation = database.conversation(conversation_id)
    if conversation is None:
        return None
    folders = tuple(folder for folder in database.folders() if folder.id == conversation.folder_id)
    return _Chat(conversation, to_export(database, conversation_id), folders)


def _write_markdown(
    conversation: Conversation, messages: Sequence[Message], path: Path, _cancelled: CancelCheck
) -> None:
    write_whole(path, to_markdown(conversation, MessageTree(messages).path()))
