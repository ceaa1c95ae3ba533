"""Other programs' requests in the window's engine process: they share it with chats, and the model is the user's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from engine.common.errors import EngineError, ErrorCode
from engine.process.failures import as_engine_error, log_failure
from engine.process.requests import RequestQueue
from engine.protocol import ServeOthers

if TYPE_CHECKING:
    from engine.runtime.engine import Engine
    from engine.serving.broker import RequestBroker
    from engine.serving.link import BrokerLink


class ApiRequests:
    """Lets other programs' requests join the window's chats, with the model that the window has loaded.

    A request to load or free a model, or to tune, ends them.  Nothing heavy is imported until a program may ask.
    """

    def __init__(self, requests: RequestQueue) -> None:
        self._requests, self._lock = requests, threading.Lock()
        self._command: ServeOthers | None = None
        self.broker: RequestBroker | None = None
        self._link: BrokerLink | None = None
        self._model: Path | None = None

    def serve(self, command: ServeOthers) -> None:
        """Has the engine's thread connect to the server behind this link, or hang up, soon."""
        with self._lock:
            self._command = command
        self._requests.look_after_others()

    # --- the engine's thread ----------------------------------------------------------------------

    def open(self, engine: Engine) -> None:
        from engine.serving.broker import RequestBroker  # imports torch

        self.broker = RequestBroker(engine, self._requests.look_after_others)
        self.broker.model_is(self._model)

    def admit(self, engine: Engine) -> None:
        """Lets who waits join those that the engine is answering, as far as there are places."""
        if self._command is not None:
            with self._lock:
                command, self._command = self._command, None
            self._connect(engine, command)
        broker = self.broker
        if broker is None:
            return
        try:
            while (wanted := broker.next_model) is not None and wanted != self._model:
                words = "The model was changed in Switchyard's window: ask again."
                broker.refuse_waiting(EngineError(ErrorCode.MODEL_NOT_FOUND, words), wanted)
            broker.admit()
        except BaseException as error:
            log_failure(error, "answering another program")
            broker.refuse(as_engine_error(error, "answering another program"))
            broker.free()

    def leave(self) -> None:
        """The window is about to free its model; `model_is` tells the server once the memory is there for another."""
        self._model = None
        if self.broker is not None:
            self.broker.free()
            self.broker.model_is(None)

    def model_is(self, model: Path | None) -> None:
        """The window has loaded this model, or has none any more."""
        if model is None:
            self.leave()
        elif self.broker is not None:
            self.broker.model_is(model)
        self._model = model
        if self._link is not None:
            self._link.model_is(model)

    def _connect(self, engine: Engine, command: ServeOthers) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if not command.address:
            return
        if self.broker is None:
            self.open(engine)
        from engine.serving.link import BrokerLink

        assert self.broker is not None
        try:
            self._link = BrokerLink(command.address, command.secret, self.broker)
        except EngineError as error:  # it was turned off meanwhile
            log_failure(error, "reaching the server for other programs")
            return
        self._link.model_is(self._model)
