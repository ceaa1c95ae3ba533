"""Documents of chats for the window: read, indexed and watched in the background; nothing here blocks its thread."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PySide6.QtCore import QFileSystemWatcher, QObject, Qt, Signal

from app.services.background import TaskQueue, timer
from app.services.chat_store import Attachment, ChatStore, Source, new_id
from app.services.documents.index import FILE_NAME, DocumentIndex, FileState, digest_of
from app.services.documents.prompts import Asked, Given, given, joined
from engine.batch_files.documents import Document, DocumentReader, Part, is_readable
from engine.common.errors import RequestCancelled
from engine.common.paths import data_dir
from engine.common.sizes import about
from engine.common.untrusted import read_untrusted, reason

MOST_FILE_BYTES = 200 * 10**6
MOST_FOLDER_FILE_BYTES = 50 * 10**6
MOST_FILES = 20_000
MOST_ENTRIES = 200_000
"""Of a folder, looked at: where there are more, most are not for reading."""
MOST_FOLDER_CHARACTERS = 200 * 10**6
"""About as many as in 60,000 pages."""
_SAMPLED = 16
"""Pieces by which a document's tokens are counted."""
_SLICE_S = 0.5
"""After which reading a folder lets others have their turn."""
_WATCHED_FOLDERS = 500
_SETTLED_MS = 800
_POLL_MS = 30_000
_IDLE_MS = 60_000
_TOLD_S = 0.1
_FRESH_S = 5.0
"""For so long a folder that was looked at is not looked at again because its chat is opened."""
_UNREAD_FOLDERS = frozenset(("node_modules", "__pycache__", "venv", "env", "site-packages", "target", "dist", "build"))


@dataclass(slots=True)
class _Folder:
    attachment: Attachment
    left: list[tuple[Path, str, FileState]]
    of: int
    note: str = ""
    characters: int = 0
    """Read so far, with what was known before."""


class Documents(QObject):
    """One for all chats.

    Signals:
        changed: an `Attachment`, of which more is known: it was read, or is read no more.
        advanced: the id of one that is being read, and how much of it has been, 0 to 1.
    """

    changed = Signal(object)
    advanced = Signal(str, float)
    _told = Signal(str, float)

    def __init__(self, store: ChatStore, parent: QObject | None = None, *, path: Path | None = None) -> None:
        super().__init__(parent)
        self._store = store
        session = new_id()
        path = path or data_dir() / FILE_NAME
        # Two threads at most, with a connection each: a question does not wait for a folder that is being read.
        self._index, self._asked_index = DocumentIndex(path, session), DocumentIndex(path, session)
        self._memory = DocumentIndex(None)
        self._scratch: dict[str, tuple[Part, ...]] = {}
        """Documents of scratch chats, in memory alone; their text is written if the chat is kept after all."""
        self._reading, self._asking = TaskQueue(self), TaskQueue(self)
        self._reader = DocumentReader()
        self._closing = threading.Event()
        self._known: dict[str, Attachment] = {}
        """What is being read or was in this session."""
        self._pending: set[str] = set()
        self._gone: set[str] = set()
        """Not wanted any more while they are read."""
        self._waiting: list[tuple[frozenset[str], Callable[[], None]]] = []
        self._shares: dict[str, float] = {}
        self._watched: dict[str, Attachment] = {}
        self._looked_at: dict[str, float] = {}
        self._watcher: QFileSystemWatcher | None = None
        self._settled = timer(self, self._look_again, _SETTLED_MS, once=True)
        self._poll = timer(self, self._look_again, _POLL_MS)
        self._idle = timer(self, lambda: self._reading.add(self._rest), _IDLE_MS, once=True)
        self._told.connect(self._on_share, Qt.ConnectionType.QueuedConnection)
        store.documents_known.connect(self._keep_only)
        if store.known_documents is not None:
            self._keep_only(store.known_documents)
        store.documents_gone.connect(self.forget)

    def _keep_only(self, known: set[str]) -> None:
        self._reading.add(lambda: self._index.keep_only(known))

    # --- for the window ---

    def attach(self, paths: Sequence[Path], *, is_scratch: bool = False) -> tuple[Attachment, ...]:
        """Begins to read files and folders; `changed` tells of each when that has ended.  Of scratch ones nothing is
        written."""
        found = []
        for path in paths:
            kind = "folder" if path.is_dir() else "file"
            one = Attachment(new_id(), path.name or str(path), kind, str(path.absolute()))  # type: ignore[arg-type]
            found.append(one)
            if is_scratch:
                self._scratch[one.id] = ()
            self._read(one)
        return tuple(found)

    def keep(self, attachments: Iterable[Attachment]) -> None:
        """Their scratch chat has just been stored: so are they."""
        for one in map(self.known, attachments):
            parts = self._scratch.pop(one.id, None)
            if parts is None:
                continue
            self._forget_pieces([one.id])
            if one.kind == "folder":
                self._read(one)
            elif one.id not in self._pending:
                self._store.update_document(one, parts)

    def resume(self, attachments: Iterable[Attachment]) -> None:
        """Goes on with those that were being read when the window was closed, and looks after the folders of a chat on
        screen, in place of those of another one."""
        some = tuple(attachments)
        for one in some:
            if not one.is_read and one.id not in self._pending and one.id not in self._known:
                self._read(one)
        folders = {one.id: one for one in some if one.kind == "folder" and one.path and one.is_read}
        if folders.keys() != self._watched.keys():
            self._watched = folders
            self._watch()
            if any(time.monotonic() - self._looked_at.get(id_, -_FRESH_S) >= _FRESH_S for id_ in folders):
                self._look_again()

    def known(self, attachment: Attachment) -> Attachment:
        return self._known.get(attachment.id, attachment)

    def share(self, attachment_id: str) -> float | None:
        return self._shares.get(attachment_id, 0.0) if attachment_id in self._pending else None

    def forget(self, ids: Iterable[str]) -> None:
        """Removes what was kept of documents that no chat has any more."""
        gone = set(ids)
        self._gone |= gone & self._pending
        for id_ in gone:
            self._known.pop(id_, None)
            self._looked_at.pop(id_, None)
            if id_ not in self._pending:
                self._scratch.pop(id_, None)
        if gone:
            self._forget_pieces(gone)

    def ask(
        self, asked: Asked, done: Callable[[Given], object], failed: Callable[[Exception], object] | None = None
    ) -> None:
        """Chooses what a model is given to read, once all files have been read; of folders, what there is so far."""
        ids = {one.id for _, attached in asked.attached for one in attached if one.kind == "file"}

        def begin() -> None:
            newest = tuple((message_id, tuple(map(self.known, attached))) for message_id, attached in asked.attached)
            self._asking.add(lambda: self._given(replace(asked, attached=newest)), done, failed)

        awaited = frozenset(ids & self._pending)
        if awaited:
            self._waiting.append((awaited, begin))
        else:
            begin()

    def surroundings(self, source: Source, done: Callable[[tuple[str, str, str]], object]) -> None:
        """What stands before a source, its text, and what stands after it, as far as they are known."""

        def look() -> tuple[str, str, str]:
            index = self._ensured([Attachment(source.attachment, source.name)])
            before = index.pieces_at(source.attachment, source.name, source.first - 2, source.first - 1)
            own = index.pieces_at(source.attachment, source.name, source.first, source.last)
            after = index.pieces_at(source.attachment, source.name, source.last + 1, source.last + 2)
            text = joined(own)
            if source.text and text.split() != source.text.split():  # a folder's file has changed since
                return "", source.text, ""
            head, tail = joined([*before, *own[:1]]), joined([*own[-1:], *after])
            return head[: len(head) - len(joined(own[:1]))], text, tail[len(joined(own[-1:])) :]

        self._asking.add(look, done, lambda _error: done(("", source.text, "")))

    def find(
        self,
        attachments: Sequence[Attachment],
        question: str,
        done: Callable[[str], object],
        failed: Callable[[Exception], object],
    ) -> None:
        """The passages of these documents that fit a question best, each with the name of its file; empty if none."""

        def look() -> str:
            found = self._ensured(attachments).search([one.id for one in attachments], question)
            return "\n\n".join(f"{piece.name}\n{piece.text}" for piece in found)

        self._asking.add(look, done, failed)

    def sample(self, attachment: Attachment, done: Callable[[tuple[str, ...]], object]) -> None:
        def look() -> tuple[str, ...]:
            return tuple(piece.text for piece in self._index_for([attachment]).spread(attachment.id, _SAMPLED))

        self._asking.add(look, done, lambda _error: None)

    def set_tokens(self, attachment_id: str, tokens_per_character: float) -> None:
        """How many tokens a document has, by the share of a sample."""
        known = self._known.get(attachment_id)
        if known is not None and known.characters:
            self._finish(replace(known, tokens=max(round(known.characters * tokens_per_character), 1)), None)

    def close(self) -> None:
        self._closing.set()
        for each in (self._settled, self._poll, self._idle):
            each.stop()
        self._waiting.clear()
        self._reading.close()
        self._asking.close()
        self._reader.close()
        for index in (self._index, self._asked_index, self._memory):
            index.close()
        if self._watcher is not None:
            self._watcher.deleteLater()
            self._watcher = None

    # --- reading, off the window's thread ---

    def _read(self, one: Attachment) -> None:
        self._idle.stop()
        self._known[one.id] = one
        self._pending.add(one.id)
        if one.kind == "folder":
            self._reading.add(lambda: self._scan(one), self._on_scanned, lambda error: self._on_failed(one, error))
        else:
            self._reading.add(lambda: self._file(one), self._on_file, lambda error: self._on_failed(one, error))

    def _file(self, one: Attachment) -> tuple[Attachment, tuple[Part, ...] | None]:
        if not one.path:
            return replace(one, problem="has no text that was kept", is_read=True), None
        read = self._document(Path(one.path), MOST_FILE_BYTES, lambda share: self._tell(one.id, share))
        if one.id in self._gone:
            raise RequestCancelled
        self._index_of(one).put(one.id, one.name, FileState(0, 0), read)
        characters = sum(len(part.text) for part in read.parts)
        found = replace(one, pages=read.pages, characters=characters, problem=read.problem, remark=read.remark)
        return replace(found, is_read=True), read.parts

    def _document(self, path: Path, most_bytes: int, on_share: Callable[[float], object]) -> Document:
        if path.is_dir():
            return Document(problem="is a folder")
        return self._reader.read(path, self._closing.is_set, on_share, most_bytes=most_bytes)

    def _scan(self, one: Attachment) -> _Folder:
        folder = Path(one.path)
        files: dict[str, tuple[Path, FileState]] = {}
        note = ""
        if not one.path or not folder.is_dir():
            self._index_of(one).add_empty(one.id)
            problem = "is not there any more; what was read of it is still used" if one.path else "is on another PC"
            return _Folder(replace(one, problem=problem), [], 0)
        entries = 0
        for path, name, state in _walk(folder):
            entries += 1
            if self._closing.is_set() or one.id in self._gone:
                raise RequestCancelled
            if entries > MOST_ENTRIES:
                note = f"It has more than {MOST_ENTRIES:,} entries: the rest is left out. Attach a folder in it."
                break
            if state is None:
                continue
            if len(files) == MOST_FILES:
                note = f"It has more than {MOST_FILES:,} files to read: the rest is left out. Attach a folder in it."
                break
            files[name] = path, state
        index = self._index_of(one)
        known = index.states(one.id)
        index.add_empty(one.id)
        index.drop_files(one.id, [name for name in known if name not in files])
        left = [
            (path, name, state)
            for name, (path, state) in sorted(files.items(), reverse=True)
            if name not in known or (known[name].size, known[name].mtime_ns) != (state.size, state.mtime_ns)
        ]
        characters = index.figures(one.id).characters
        return _Folder(replace(one, problem=""), left, max(len(left), 1), note, characters)

    def _some(self, folder: _Folder) -> _Folder:
        until = time.monotonic() + _SLICE_S
        one = folder.attachment
        index = self._index_of(one)
        known = index.states(one.id)
        while folder.left and time.monotonic() < until:
            if self._closing.is_set() or one.id in self._gone:
                raise RequestCancelled
            if folder.characters > MOST_FOLDER_CHARACTERS:
                words = f"It has more than {MOST_FOLDER_CHARACTERS:,} characters of text: the rest is left out."
                folder.left, folder.note = [], f"{folder.note} {words}".strip()
                break
            path, name, state = folder.left.pop()
            try:
                digest = digest_of(read_untrusted(path, MOST_FOLDER_FILE_BYTES))
            except OSError as error:
                why = f"cannot be read ({reason(error)})"
                if state.size > MOST_FOLDER_FILE_BYTES:
                    why = f"has {about(state.size)}, more than the {about(MOST_FOLDER_FILE_BYTES)} that are read"
                index.put(one.id, name, state, Document(problem=why))
                continue
            state = replace(state, digest=digest)
            if name in known and known[name].digest == digest:
                index.touch(one.id, name, state)
            else:
                read = self._document(path, MOST_FOLDER_FILE_BYTES, lambda _share: None)
                index.put(one.id, name, state, read)
                folder.characters += sum(len(part.text) for part in read.parts)
            self._tell(one.id, 1 - len(folder.left) / folder.of)
        return folder

    def _counted(self, folder: _Folder) -> Attachment:
        one = folder.attachment
        figures = self._index_of(one).figures(one.id)
        problem, remark = one.problem, folder.note
        if not problem and not figures.files:
            problem = "has no files that can be read" if not figures.unread else "has only files that cannot be read"
        if figures.unread:
            name, why = figures.unread[0]
            more = f", and {len(figures.unread) - 1:,} more cannot be read" if len(figures.unread) > 1 else ""
            remark = f"{remark} {name} {why}{more}.".strip()
        return replace(
            one,
            pages=figures.pages,
            characters=figures.characters,
            tokens=one.tokens if figures.characters == one.characters else 0,  # to be counted again
            files=figures.files,
            problem=problem,
            remark=remark,
            is_read=True,
        )

    def _given(self, asked: Asked) -> Given:
        return given(self._ensured([one for _, attached in asked.attached for one in attached]), asked)

    def _index_of(self, one: Attachment) -> DocumentIndex:
        """Where reading puts it."""
        return self._memory if one.id in self._scratch else self._index

    def _index_for(self, attachments: Sequence[Attachment]) -> DocumentIndex:
        """Where questions find documents, all of the same chat."""
        return self._memory if any(one.id in self._scratch for one in attachments) else self._asked_index

    def _ensured(self, attachments: Sequence[Attachment]) -> DocumentIndex:
        """Their index; what is missing in it is put there again, from the texts that chats keep."""
        index = self._index_for(attachments)
        for one in attachments:
            if one.kind == "file" and not index.has(one.id):
                parts = self._scratch.get(one.id) or self._store.document_parts(one.id)
                if parts:
                    index.put(one.id, one.name, FileState(0, 0), Document(parts, one.pages))
        return index

    def _forget_gone(self, one: Attachment) -> None:
        """Now that it is read no more."""
        self._gone.discard(one.id)
        self._scratch.pop(one.id, None)
        self._forget_pieces([one.id])

    def _forget_pieces(self, ids: Collection[str]) -> None:
        def run() -> None:
            self._index.forget(ids)
            self._memory.forget(ids)

        self._reading.add(run)

    def _rest(self) -> None:
        self._reader.close()

    def _tell(self, id_: str, share: float) -> None:
        now = time.monotonic()
        if now - self._last_told >= _TOLD_S:
            self._last_told = now
            self._told.emit(id_, share)

    _last_told = 0.0

    # --- and back on it ---

    def _on_share(self, id_: str, share: float) -> None:
        if id_ in self._pending:
            self._shares[id_] = share
            self.advanced.emit(id_, share)

    def _on_file(self, found: tuple[Attachment, tuple[Part, ...] | None]) -> None:
        self._finish(*found)

    def _on_scanned(self, folder: _Folder) -> None:
        one = folder.attachment
        failed: Callable[[Exception], object] = lambda error: self._on_failed(one, error)  # noqa: E731
        if folder.left:
            self._reading.add(lambda: self._some(folder), self._on_scanned, failed)
        else:
            self._reading.add(lambda: self._counted(folder), lambda found: self._finish(found, None), failed)

    def _on_failed(self, one: Attachment, error: Exception) -> None:
        if isinstance(error, RequestCancelled):  # the window closes, or nobody wants it any more
            self._pending.discard(one.id)
            if one.id in self._gone:
                self._forget_gone(one)
            self._begin_waiting()
            return
        why = reason(error) if isinstance(error, OSError | sqlite3.Error) else type(error).__name__
        self._finish(replace(one, problem=f"could not be indexed ({why})", is_read=True), None)

    def _finish(self, one: Attachment, parts: tuple[Part, ...] | None) -> None:
        before = self._known.get(one.id)
        if one.kind == "folder" and before is not None and before.characters == one.characters:
            one = replace(one, tokens=one.tokens or before.tokens)
        self._pending.discard(one.id)
        self._shares.pop(one.id, None)
        if one.id in self._gone:
            self._forget_gone(one)
            return
        self._looked_at[one.id] = time.monotonic()
        is_new = before != one
        self._known[one.id] = one
        if one.id in self._watched:
            self._watched[one.id] = one
        if one.id in self._scratch:
            self._scratch[one.id] = self._scratch[one.id] if parts is None else parts
        elif is_new:
            self._store.update_document(one, parts)
        if is_new:
            self.changed.emit(one)
        self._begin_waiting()
        if not self._pending:
            self._idle.start()

    def _begin_waiting(self) -> None:
        ready = [begin for awaited, begin in self._waiting if not awaited & self._pending]
        self._waiting = [entry for entry in self._waiting if entry[0] & self._pending]
        for begin in ready:
            begin()

    # --- folders that are watched ---

    def _watch(self) -> None:
        """Of the folders on screen; where the system cannot tell of changes, they are looked for now and then."""
        if self._watcher is not None:
            self._watcher.deleteLater()
            self._watcher = None
        if not self._watched:
            self._poll.stop()
            return
        self._poll.start()
        folders = [one.path for one in self._watched.values()]
        self._asking.add(lambda: _folders_in(folders), self._on_folders)

    def _on_folders(self, found: list[str]) -> None:
        if self._watched and found and not self._closing.is_set():
            self._watcher = watcher = QFileSystemWatcher(found, self)
            watcher.directoryChanged.connect(self._settled.start)

    def _look_again(self) -> None:
        for one in self._watched.values():
            if one.id not in self._pending:
                self._read(self.known(one))


def _walk(folder: Path) -> Iterator[tuple[Path, str, FileState | None]]:
    """All in a folder but what hidden and generated ones hold; what has a state can be read.  No link is followed."""
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            entries = os.scandir(here)
        except OSError:
            continue
        with entries:
            for entry in entries:
                path = Path(entry.path)
                state = None
                try:
                    if entry.name.startswith((".", "~$")) or entry.is_symlink():
                        pass
                    elif entry.is_dir(follow_symlinks=False):
                        if entry.name.lower() not in _UNREAD_FOLDERS:
                            waiting.append(path)
                    elif is_readable(entry.name) and entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        state = FileState(status.st_size, status.st_mtime_ns)
                except OSError:
                    pass
                yield path, path.relative_to(folder).as_posix(), state


def _folders_in(folders: Sequence[str]) -> list[str]:
    found: list[str] = []
    for folder in folders:
        waiting = [folder]
        while waiting and len(found) < _WATCHED_FOLDERS:
            here = waiting.pop(0)
            found.append(here)
            try:
                with os.scandir(here) as entries:
                    waiting += [
                        entry.path
                        for entry in entries
                        if not entry.name.startswith(".")
                        and entry.name.lower() not in _UNREAD_FOLDERS
                        and entry.is_dir(follow_symlinks=False)
                    ]
            except OSError:
                continue
    return found
