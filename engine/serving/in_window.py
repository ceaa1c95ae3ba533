"""Other programs' requests in the window's engine process: they share it with chats, and the model is the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.process.failures import as_engine_error, log_failure
from engine.process.requests import RequestQueue
from engine.protocol import ServeOthers
from engine.serving.asking import Ask, Event, State, Ticket
from engine.serving.desk import Desk, DeskEngine
from engine.serving.link import DeskLink


class WindowDesk:
    """Lets other programs' requests join the window's chats, with the model that the window has loaded.

    A request to load or free a model, or to tune, ends them.
    """

    def __init__(self, engine: DeskEngine, requests: RequestQueue) -> None:
        self._requests = requests
        self._desk = Desk(engine, requests.look_after_others)
        self._link: DeskLink | None = None
        self._model: Path | None = None

    def connect(self, command: ServeOthers) -> None:
        """Serves the server behind this link from now on, or none."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if command.address:
            try:
                self._link = DeskLink(command.address, command.secret, self)
            except EngineError as error:  # it was turned off meanwhile
                log_failure(error, "reaching the server for other programs")
                return
            self._link.model_is(self._model)

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        """See `Answerer`."""
        return self._desk.ask(ask, on_event)

    @property
    def state(self) -> State:
        """See `Answerer`."""
        return self._desk.state

    def prepare(self, model: Path) -> None:
        """The window's user loads models."""

    def release(self, model: Path, after_s: float = 0) -> None:
        """And frees them."""

    # --- the engine's thread ----------------------------------------------------------------------

    def model_is(self, model: Path | None) -> None:
        """The window has loaded this model, or is about to free the one it had."""
        if model is None:
            self._desk.free()
        self._model = model
        self._desk.model_is(model)
        if self._link is not None:
            self._link.model_is(model)

    def admit(self) -> None:
        """Lets who waits join those that the engine is answering, as far as there are places."""
        try:
            while (wanted := self._desk.next_model) is not None and wanted != self._model:
                words = "The model was changed in Switchyard's window: ask again."
                self._desk.refuse_waiting(EngineError(ErrorCode.MODEL_NOT_FOUND, words), wanted)
            self._desk.admit()
        except BaseException as error:
            log_failure(error, "answering another program")
            self._desk.refuse(as_engine_error(error, "answering another program"))
            self._desk.free()
