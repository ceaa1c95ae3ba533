"""Other programs' requests in the window's engine process: chats come first, and the model is the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.batch_files.messages import SampleBatch, StartBatch
from engine.common.errors import EngineError, ErrorCode
from engine.process.failures import as_engine_error, log_failure
from engine.process.requests import AnswerOthers, Request, RequestQueue
from engine.protocol import Generate, ServeOthers
from engine.serving.asking import Ask, Event, State, Ticket
from engine.serving.desk import Desk, DeskEngine
from engine.serving.link import DeskLink


class WindowDesk:
    """Answers other programs on the engine's thread, with the model that the window has loaded.

    A chat is answered between two of their tokens.  A request to load or free a model, or to tune, ends them.
    A batch begins once those under way are done, and then gives way to later ones.

    Args:
        answer_next: performs the next waiting request, a chat.
    """

    def __init__(self, engine: DeskEngine, requests: RequestQueue, answer_next: Callable[[], object]) -> None:
        self._requests, self._answer_next = requests, answer_next
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

    def release(self, model: Path) -> None:
        """And frees them."""

    # --- the engine's thread ----------------------------------------------------------------------

    def make_room(self) -> None:
        """Before something that needs the memory: frees keys and values, and ends what is under way."""
        self._desk.free()

    def model_is(self, model: Path | None) -> None:
        """The window has loaded this model, or is about to free the one it had."""
        if model is None:
            self._desk.free()
        self._model = model
        self._desk.model_is(model)
        if self._link is not None:
            self._link.model_is(model)

    def answer(self) -> None:
        """Answers who waits, until nobody is left or the engine is wanted for something else."""
        try:
            while self._has_work() and self._model is not None:
                if self._desk.answer(self._is_interrupted, lambda: self._waiting() is not None):
                    if self._waiting() is not None:
                        break
                elif isinstance(self._waiting(), Generate):
                    self._answer_next()
                elif self._is_interrupted():
                    self._desk.free()
                    break
        except BaseException as error:
            log_failure(error, "answering another program")
            self._desk.refuse(as_engine_error(error, "answering another program"))
            self._desk.free()
        if self._desk.state.waiting:
            self._requests.look_after_others()

    def _has_work(self) -> bool:
        while (wanted := self._desk.next_model) is not None and wanted != self._model:
            words = "The model was changed in Switchyard's window: ask again."
            self._desk.refuse_waiting(EngineError(ErrorCode.MODEL_NOT_FOUND, words), wanted)
        return wanted is not None or self._desk.state.under_way > 0

    def _is_interrupted(self) -> bool:
        """Whether something waits that cannot wait for these answers."""
        waiting = self._waiting()
        return waiting is not None and not isinstance(waiting, StartBatch | SampleBatch)

    def _waiting(self) -> Request | None:
        """What the window wants next; that other programs ask more is no news here."""
        while isinstance(waiting := self._requests.waiting(), AnswerOthers):
            self._requests.take()
        return waiting
