"""Messages between the HTTP server's process and the engine's, and how they are sent without anybody waiting."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.common.errors import EngineError, ErrorCode
from engine.common.json_fields import MessageLines
from engine.serving.asking import Ask, Began, Ended, PromptRead, Said

_NOTICES_S = 0.5


@dataclass(frozen=True, slots=True)
class Asked:
    """A client asks; the number is the server's."""

    number: int
    ask: Ask


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody waits for this any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Load it before anybody asks."""

    model: Path


@dataclass(frozen=True, slots=True)
class Release:
    """Free it once nobody has asked for it for so long; see `Answerer.release`."""

    model: Path
    after_s: float


@dataclass(frozen=True, slots=True)
class Happened:
    """What has become of a request: one of the others is set; a refusal is its code and its sentence."""

    number: int
    began: Began | None = None
    read: PromptRead | None = None
    said: Said | None = None
    ended: Ended | None = None
    code: ErrorCode | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class ModelIs:
    """What is loaded now, or what is being loaded, if that is known."""

    model: Path | None
    loading: Path | None = None


@dataclass(frozen=True, slots=True)
class Remark:
    """Something for people."""

    text: str


LINES = MessageLines((Asked, Cancelled, Prepare, Release, Happened, ModelIs, Remark))


class Line:
    """Messages both ways, without ever waiting for the other side."""

    def __init__(self, connection: Connection, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._connection, self._on_message, self._on_lost = connection, on_message, on_lost
        self._unsent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._write)]

    def start(self) -> None:
        for thread in reversed(self._threads):  # the reader waits for the writer in the end
            thread.start()

    def send(self, message: Any) -> None:
        """Has it sent soon; without effect once the line is lost."""
        self._unsent.put(message)

    def close(self) -> None:
        """Sends what is left, and ends; waits for both threads, but not for its own."""
        self._unsent.put(None)
        for thread in reversed(self._threads):
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join()

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError, EngineError):
            while self._has_come():
                self._on_message(LINES.decode(self._connection.recv_bytes()))
        self._hang_up()
        self._unsent.put(None)
        self._threads[1].join()
        self._connection.close()
        self._on_lost()

    def _has_come(self) -> bool:
        """Waits; a pipe of Windows does not notice that this side wants to end."""
        while os.name == "nt" and not self._connection.poll(_NOTICES_S):
            if not self._threads[1].is_alive():
                return False
        return True

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (message := self._unsent.get()) is not None:
                self._connection.send_bytes(LINES.encode(message))
        self._hang_up()

    def _hang_up(self) -> None:
        """Both threads notice."""
        if os.name != "nt":
            with (
                contextlib.suppress(OSError, ValueError),
                socket.socket(fileno=os.dup(self._connection.fileno())) as end,
            ):
                end.shutdown(socket.SHUT_RDWR)
