"""Messages between two processes of this program, both ways: over a local socket, or the pipes of a child."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import try_lock

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MAX_LINE_BYTES = 64 * 2**20
"""Whoever receives a longer line rejects it instead of buffering it."""
ANY_LENGTH = 2**40
"""Instead of that, between our own processes: many rows of a job are one line, with their pictures."""
LINK_PREFIX = "switchyard-link-"
_NOTICES_S = 0.5
_log = logging.getLogger(__name__)


class Pipes:
    """Two pipes as one connection: what a child reads and writes, or its other ends."""

    def __init__(self, inlet: IO[bytes], outlet: IO[bytes], most_bytes: int = MAX_LINE_BYTES) -> None:
        self._inlet, self._outlet, self._most_bytes = inlet, outlet, most_bytes

    def recv_bytes(self) -> bytes:
        """One line.  Raises EOFError at the end, and EngineError `PROTOCOL` if it is too long."""
        if not (line := self._inlet.readline(self._most_bytes + 1)):
            raise EOFError
        if len(line) > self._most_bytes:
            raise EngineError(ErrorCode.PROTOCOL, f"A protocol line is longer than {self._most_bytes} bytes.")
        return line

    def send_bytes(self, line: bytes) -> None:
        self._outlet.write(line)
        self._outlet.flush()

    def hang_up(self) -> None:
        """The other side notices, and hangs up, too."""
        with contextlib.suppress(OSError, ValueError):
            self._outlet.close()

    def close(self) -> None:
        self._inlet.close()


class Channel:
    """Sends and receives without ever waiting for the other side.

    Args:
        on_message: told of each message that comes, on a thread of its own; an error of it ends the channel.
        on_lost: told once, behind the last message, that no more can come.
    """

    def __init__(
        self, connection: Connection | Pipes, on_message: Callable[[bytes], None], on_lost: Callable[[], None]
    ) -> None:
        self._connection, self._on_message, self._on_lost = connection, on_message, on_lost
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]

    def start(self) -> None:
        for thread in reversed(self._threads):  # the reader waits for the writer in the end
            thread.start()

    def send(self, message: bytes) -> None:
        """Has it sent soon; without effect once the channel is lost."""
        self._unsent.put(message)

    def hang_up(self) -> None:
        """Sends what is left and ends, which the other side notices."""
        self._unsent.put(None)

    def flush(self) -> None:
        """Hangs up, and waits until all has been sent."""
        self.hang_up()
        self._threads[1].join()

    def close(self) -> None:
        """Hangs up, and waits until the other side has ended, too."""
        self.hang_up()
        for thread in reversed(self._threads):
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join()

    def _read(self) -> None:
        try:
            while self._has_come():
                self._on_message(self._connection.recv_bytes())
        except (OSError, EOFError, EngineError):
            pass
        except Exception as error:  # without its text, which can quote a prompt
            _log.error("a channel ends: its message could not be handled (%s)", type(error).__name__)
        self._end()
        self._unsent.put(None)
        self._threads[1].join()
        self._connection.close()
        self._on_lost()

    def _has_come(self) -> bool:
        """Waits; a named pipe of Windows does not notice that this side wants to end."""
        while os.name == "nt" and not isinstance(self._connection, Pipes) and not self._connection.poll(_NOTICES_S):
            if not self._threads[1].is_alive():
                return False
        return True

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (message := self._unsent.get()) is not None:
                self._connection.send_bytes(message)
        self._end()

    def _end(self) -> None:
        """Both threads notice."""
        if isinstance(self._connection, Pipes):
            self._connection.hang_up()
        elif os.name != "nt":
            import socket  # the window, which has no such line, reads this module with the protocol

            with (
                contextlib.suppress(OSError, ValueError),
                socket.socket(fileno=os.dup(self._connection.fileno())) as end,
            ):
                end.shutdown(socket.SHUT_RDWR)


class LinkFolder:
    """A new folder, after those of servers that were killed have been removed.

    It is locked as long as its process lives; where folders cannot be locked, none is removed.

    Attributes:
        place: of the link in it; None on Windows, whose pipes have no file.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self.place: str | None = None
        if os.name == "posix":
            remove_abandoned()
            while self._descriptor < 0:
                self.place = os.path.join(self._made(), "engine")

    def _made(self) -> str:
        folder = tempfile.mkdtemp(prefix=LINK_PREFIX)
        descriptor = os.open(folder, os.O_RDONLY)
        try_lock(descriptor)
        if os.path.isdir(folder):
            self._descriptor = descriptor
        else:  # another server that started just then took it for abandoned
            os.close(descriptor)
        return folder

    def leave(self) -> None:
        """Gives up the lock, once the folder has been removed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def remove_abandoned() -> None:
    """Removes folders of this user that no living process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{LINK_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            if try_lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def forget_link(address: str) -> None:
    """Removes what is left of a link whose server has ended."""
    if os.name == "posix" and address:
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)
