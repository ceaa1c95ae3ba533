"""The window's switch in the engine process: nothing heavy is imported until another program may ask."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from engine.process.requests import RequestQueue
from engine.protocol import ServeOthers

if TYPE_CHECKING:
    from engine.serving.desk import DeskEngine
    from engine.serving.in_window import WindowDesk


class OtherPrograms:
    """Does on the engine's thread what the window said on the reader's."""

    def __init__(self, requests: RequestQueue) -> None:
        self._requests, self._lock = requests, threading.Lock()
        self._command: ServeOthers | None = None
        self._desk: WindowDesk | None = None
        self._model: Path | None = None

    def serve(self, command: ServeOthers) -> None:
        """Has the engine's thread connect, or end it, soon."""
        with self._lock:
            self._command = command
        self._requests.look_after_others()

    # --- the engine's thread ----------------------------------------------------------------------

    def admit(self, engine: DeskEngine) -> None:
        """Lets who waits join those that the engine is answering; see `WindowDesk`."""
        command = self._command
        if command is not None:
            with self._lock:
                command, self._command = self._command, None
        if command is not None:
            if self._desk is None and command.address:
                from engine.serving.in_window import WindowDesk  # imports torch

                self._desk = WindowDesk(engine, self._requests)
                self._desk.model_is(self._model)
            if self._desk is not None:
                self._desk.connect(command)
        if self._desk is not None:
            self._desk.admit()

    def model_is(self, model: Path | None) -> None:
        """The window has loaded this model, or is about to free the one it had."""
        self._model = model
        if self._desk is not None:
            self._desk.model_is(model)
