"""The data folder: whose it is, and moving it.

A change is scheduled and carried out at the next start, before any file in the folder is open.  Data is copied, never
moved: the old folder stays in use until the copy is complete, and is not changed afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, QElapsedTimer, QObject, QThread, Signal
from PySide6.QtNetwork import QLocalServer, QLocalSocket

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import (
    is_no_file,
    new_folder,
    private_file,
    private_folder,
    restrict_files,
    take_lock,
    write_private,
)
from engine.common.installed import version
from engine.common.paths import (
    cache_dir,
    chosen_data_dir_file,
    config_dir,
    data_dir,
    jobs_dir,
    log_dir,
    sessions_dir,
    standard_data_dir,
)
from engine.common.sizes import rounded_down, rounded_up

if TYPE_CHECKING:
    from filelock import FileLock


LOCK_NAME = "window.lock"
ANSWER_MS = 3000
_RAISE = b"raise"
_RAISED = b"raised\n"


class Claim(Enum):
    """The outcome of claiming a data folder."""

    OURS = "ours"
    RAISED_OTHER = "raised other"
    NOT_RESPONDING = "not responding"
    NOT_WRITABLE = "not writable"


class SingleInstance(QObject):
    """This process's claim to a data folder.

    The lock file decides; the local socket only carries requests to be raised.

    Signals:
        raise_requested: another start on the same folder asks this window to come to the front, and to open these
            files (a list of paths).
        other_version: what asked was of this version, and not of ours.
    """

    raise_requested = Signal(list)
    other_version = Signal(str)

    def __init__(self, folder: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._folder = folder
        self._lock: FileLock | None = None
        self._server: QLocalServer | None = None

    def claim(self, answer_ms: int = ANSWER_MS, files: Sequence[str] = ()) -> Claim:
        """Claims the folder, or raises the window that has it, waiting up to `answer_ms` for its answer.

        Args:
            files: absolute paths that the other window is to open.
        """
        try:
            private_folder(self._folder)
        except OSError:
            return Claim.NOT_WRITABLE
        path = self._folder / LOCK_NAME
        waited = QElapsedTimer()
        waited.start()
        while True:
            try:
                self._lock = take_lock(path)
            except OSError:
                return Claim.NOT_WRITABLE
            if self._lock is not None:
                break
            if self._raise_other(files):
                return Claim.RAISED_OTHER
            if waited.elapsed() > answer_ms:
                return Claim.NOT_RESPONDING
            QThread.msleep(50)  # the other process may be starting or ending
        restrict_files([path])
        self._listen()
        return Claim.OURS

    def release(self) -> None:
        """Releases the folder; no effect if it is not ours."""
        if self._server is not None:
            self._server.close()
            self._server.deleteLater()
            self._server = None
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self._folder / LOCK_NAME).unlink()
            self._lock.release()
            self._lock = None

    @property
    def _address(self) -> str:
        user = str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
        key = f"{user}:{os.path.normcase(self._folder.resolve())}"
        return "switchyard-" + hashlib.sha256(key.encode()).hexdigest()[:24]

    def _listen(self) -> None:
        server = QLocalServer(self)
        server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        server.newConnection.connect(self._on_connection)
        if not server.listen(self._address):
            QLocalServer.removeServer(self._address)  # left by a killed process: we hold the lock
            server.listen(self._address)
        self._server = server

    def _on_connection(self) -> None:
        while self._server is not None and (socket := self._server.nextPendingConnection()) is not None:
            # Closing deletes it; a connection to a function that holds it would outlive it.
            socket.readyRead.connect(self._on_ready)
            socket.disconnected.connect(socket.deleteLater)
            if socket.bytesAvailable():
                self._on_wish(socket)

    def _on_ready(self) -> None:
        socket = self.sender()
        if isinstance(socket, QLocalSocket):
            self._on_wish(socket)

    def _on_wish(self, socket: QLocalSocket) -> None:
        if not socket.canReadLine():
            return  # the rest is on its way
        wish, _, files = bytes(socket.readAll().data()).partition(b" ")
        word, _, theirs = wish.strip().partition(b"@")
        if word == _RAISE:
            socket.write(_RAISED)
            socket.flush()
            self.raise_requested.emit(_paths(files))
            asked = theirs.decode("utf-8", errors="replace")
            if asked and asked != version():
                self.other_version.emit(asked)

    def _raise_other(self, files: Sequence[str]) -> bool:
        socket = QLocalSocket()
        socket.connectToServer(self._address)
        try:
            if not socket.waitForConnected(500):
                return False
            wish = _RAISE + b"@" + version().encode()
            socket.write(wish + (b" " + json.dumps(list(files)).encode() if files else b"") + b"\n")
            socket.waitForBytesWritten(500)
            return socket.waitForReadyRead(1000) and bytes(socket.readAll().data()) == _RAISED
        finally:
            socket.abort()


def _paths(said: bytes) -> list[str]:
    try:
        paths = json.loads(said or b"[]")
    except ValueError:
        return []
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []


translate = QCoreApplication.translate

_CHUNK_BYTES = 4 * 2**20
_UNFINISHED = ".switchyard-unfinished"
_FILE_SUFFIXES = (".json", ".jsonl", ".log", ".lock", ".sqlite3", ".sqlite3-wal", ".sqlite3-shm", ".txt")
_OURS = ("chats.sqlite3", "models")


@dataclass(frozen=True, slots=True)
class FolderChange:
    """A change for the next start: the new folder, and whether to copy chats and models to it."""

    target: Path
    copy: bool


def what_is_no_file() -> Path | None:
    """Something else in the place of one of our files, such as a pipe, which whoever opened it would wait for; None if
    there is nothing of the kind."""
    return next((odd for folder in _own_folders() for odd in _no_files_in(folder)), None)


def _own_folders() -> Iterator[Path]:
    yield config_dir()  # first: a file in it says where the others are
    yield from (jobs_dir(), sessions_dir(), cache_dir(), log_dir(), data_dir())
    large = {"models", "banks", "converted", "parts", "jobs", "sessions"}
    with contextlib.suppress(OSError):
        yield from [path for path in data_dir().iterdir() if path.name not in large and path.is_dir()]


def _no_files_in(folder: Path) -> Iterator[Path]:
    named = (config_dir(), data_dir(), log_dir())  # elsewhere a folder may be called as it likes
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if not entry.is_file(follow_symlinks=False) and is_no_file(path, _FILE_SUFFIXES if folder in named else ()):
                yield path


def holds_our_data(folder: Path) -> bool:
    return any((folder / name).exists() for name in _OURS) and not (folder / _UNFINISHED).exists()


def plan_change(change: FolderChange) -> None:
    """Schedules the change for the next start.

    Raises:
        EngineError: `INVALID_REQUEST`, if the folder cannot be used.
    """
    target = change.target
    current = data_dir()
    if target.resolve() == current.resolve():
        cancel_change()
        return
    if change.copy and (target.resolve().is_relative_to(current.resolve())):
        raise _refused(
            translate("DataFolder", "{0} is inside the current data folder; choose a folder outside it.").format(target)
        )
    try:
        new_folder(target)
        probe = target / f".switchyard-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
        write_private(_plan_file(), json.dumps({"target": str(target), "copy": change.copy}))
    except OSError as error:
        reason = error.strerror or str(error)
        raise _refused(
            translate("DataFolder", "{0} cannot be written to ({1}); choose another folder.").format(target, reason)
        ) from error


def planned_change() -> FolderChange | None:
    try:
        plan = json.loads(_plan_file().read_text(encoding="utf-8"))
        return FolderChange(Path(plan["target"]), bool(plan["copy"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cancel_change() -> None:
    _plan_file().unlink(missing_ok=True)


def carry_out(change: FolderChange, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> bool:
    """Copies the data if requested and switches to the target folder; False if it was cancelled.

    Args:
        on_progress: called with the bytes `done` of `total`.

    Raises:
        EngineError: `DISK_FULL` or `INVALID_REQUEST`; the present folder stays in use.
    """
    source = data_dir()
    if change.copy and source.is_dir() and not holds_our_data(change.target):
        try:
            if not _copy(source, change.target, on_progress, cancelled):
                return False
        except OSError as error:
            reason = error.strerror or str(error)
            raise _refused(
                translate("DataFolder", "The data could not be copied to {0} ({1}); {2} stays in use.").format(
                    change.target, reason, source
                )
            ) from error
    use_folder(change.target)
    cancel_change()
    return True


def use_folder(folder: Path) -> None:
    if folder == standard_data_dir():
        chosen_data_dir_file().unlink(missing_ok=True)
    else:
        write_private(chosen_data_dir_file(), f"{folder}\n")


def _copy(source: Path, target: Path, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> bool:
    files = [path for path in source.rglob("*") if path.is_file() and path.name != LOCK_NAME]
    total = sum(path.stat().st_size for path in files)
    new_folder(target)
    free = shutil.disk_usage(target).free
    if total > free:
        raise EngineError(
            ErrorCode.DISK_FULL,
            translate("DataFolder", "{0} has {1} free, but {2} are to be copied; {3} stays in use.").format(
                target, rounded_down(free), rounded_up(total), source
            ),
        )
    mark = target / _UNFINISHED  # marks an interrupted copy, so that it is not taken for data
    mark.touch(0o600)
    done = 0
    for path in files:
        place = target / path.relative_to(source)
        new_folder(place.parent)
        private_file(place)
        with path.open("rb") as reader, place.open("wb") as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                if cancelled():
                    return False
                writer.write(chunk)
                done += len(chunk)
                on_progress(done, total)
            writer.flush()
            os.fsync(writer.fileno())
        shutil.copystat(path, place)
    mark.unlink()
    return True


def _plan_file() -> Path:
    return config_dir() / "data-folder-next.json"


def _refused(sentence: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, sentence)
