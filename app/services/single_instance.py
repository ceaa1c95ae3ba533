"""One window per data folder: a lock that does not outlive its process, and a way to raise the window that has it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QElapsedTimer, QObject, QThread, Signal
from PySide6.QtNetwork import QLocalServer, QLocalSocket

from engine.common.files import private_folder, restrict_files, take_lock
from engine.common.installed import version

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
