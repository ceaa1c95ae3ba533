"""One window per data folder: a lock that does not outlive its process, and a way to raise the window that has it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import psutil
from PySide6.QtCore import QElapsedTimer, QLockFile, QObject, QSysInfo, QThread, Signal
from PySide6.QtNetwork import QLocalServer, QLocalSocket

from engine.common.files import private_folder, restrict_files
from engine.common.installed import version

if sys.platform != "win32":
    import fcntl

LOCK_NAME = "window.lock"
ANSWER_MS = 3000
_RAISE = b"raise"
_RAISED = b"raised\n"


class Claim(Enum):
    OURS = "ours"
    RAISED_OTHER = "raised other"
    NOT_RESPONDING = "not responding"
    NOT_WRITABLE = "not writable"


class SingleInstance(QObject):
    """This process's claim to a data folder.

    The lock file decides; the local socket only carries requests to be raised.  A lock is stale, and taken over, if
    its process is gone or its process id has been reused by a later one.

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
        self._lock: QLockFile | None = None
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
        lock = QLockFile(str(path))
        lock.setStaleLockTime(0)  # a window may stay open for weeks: only a dead process makes a lock stale
        waited = QElapsedTimer()
        waited.start()
        while not lock.tryLock(0):
            if lock.error() != QLockFile.LockError.LockFailedError:
                return Claim.NOT_WRITABLE
            if _is_of_a_later_process(lock, path) and _remove_unheld(path):
                continue
            if self._raise_other(files):
                return Claim.RAISED_OTHER
            if waited.elapsed() > answer_ms:
                return Claim.NOT_RESPONDING
            QThread.msleep(50)  # the other process may be starting or ending
        restrict_files([path])
        self._lock = lock
        self._listen()
        return Claim.OURS

    def release(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server.deleteLater()
            self._server = None
        if self._lock is not None:
            self._lock.unlock()
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


def _is_of_a_later_process(lock: QLockFile, path: Path) -> bool:
    """Whether the lock's process started after the lock was written, so that its id was reused."""
    info = lock.getLockInfo()
    if not isinstance(info, tuple) or info[1] != QSysInfo.machineHostName():
        return False
    with contextlib.suppress(OSError, psutil.Error):
        return psutil.Process(info[0]).create_time() > path.stat().st_mtime + 2
    return False


def _remove_unheld(path: Path) -> bool:
    """Removes a lock file that no process holds open; False if one does."""
    try:
        if sys.platform == "win32":
            path.unlink()  # on Windows this fails while it is open
            return True
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # QLockFile holds the same lock
            if os.fstat(descriptor).st_ino != path.stat().st_ino:
                return False  # another start has taken it
            path.unlink()
            return True
        finally:
            os.close(descriptor)
    except OSError:
        return False
