"""A request broker with an engine of its own: one thread loads models by name and answers whoever asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.common.errors import CancelCheck, RequestCancelled
from engine.process.failures import as_engine_error, log_failure
from engine.protocol import Ask
from engine.serving.asking import Event, State, Ticket, closing
from engine.serving.broker import RequestBroker

if TYPE_CHECKING:
    from engine.runtime.engine import Engine


class ModelBroker:
    """Answers requests for any model, by loading it once those for the model before have ended.

    Args:
        load: loads a model into `engine`, unless the check that it is given comes true; raises EngineError, or
            RequestCancelled then.
        idle_s: a model that nobody has asked for so long is unloaded; `None` keeps it.
        on_model: told on the engine's thread which model is loaded now.
        chat: see `RequestBroker`.
    """

    def __init__(
        self,
        engine: Engine,
        load: Callable[[Path, CancelCheck], None],
        idle_s: float | None = None,
        on_model: Callable[[Path | None], None] = lambda _model: None,
        chat: str = "",
    ) -> None:
        self._engine, self._load_model, self.idle_s, self._on_model = engine, load, idle_s, on_model
        self.broker = RequestBroker(engine, chat=chat)
        self._wanted: Path | None = None
        self._kept: tuple[Path, float] | None = None
        self._thread = threading.Thread(target=self._work, name="serving-engine", daemon=True)

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        """See `Answerer`."""
        return self.broker.ask(ask, on_event)

    @property
    def state(self) -> State:
        """See `Answerer`."""
        return self.broker.state

    def prepare(self, model: Path) -> None:
        """See `Answerer`."""
        with self.broker.changed:
            self._wanted, self._kept = model, None
            self.broker.changed.notify_all()

    def release(self, model: Path, after_s: float = 0) -> None:
        """See `Answerer`; it holds in the place of `idle_s` until the model is freed."""
        with self.broker.changed:
            if self.broker.state.model in (None, model):  # while it is loaded there is none
                self._kept = model, after_s
                self.broker.changed.notify_all()

    def close(self) -> None:
        """Ends all answers, frees the model and waits for the thread."""
        self.broker.shut()
        if self._thread.is_alive():
            self._thread.join()

    # --- the engine's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (wanted := self._awaited()) is not None:
                model, is_prepared = wanted
                try:
                    self._make_ready(model, is_prepared=is_prepared)
                    self.broker.answer()
                except BaseException as error:
                    self._failed(model, error)
        finally:
            self.broker.shut()  # nobody is answered without this thread, however it ended
            self.broker.refuse(closing().error)
            self._free()

    def _awaited(self) -> tuple[Path, bool] | None:
        """The model that is wanted next, and whether it is to be loaded even if nobody asks for it any more.

        Frees an unused one meanwhile.  None once the broker is closed.
        """
        broker = self.broker
        while True:
            with broker.changed:
                loaded = broker.state.model
                is_unused = False
                while not (broker.state.waiting or self._wanted or broker.is_closed or is_unused):
                    idle_s = None if loaded is None else self.idle_s
                    if self._kept is not None and self._kept[0] == loaded:
                        idle_s = self._kept[1]
                    can_wait = idle_s is not None and 0 <= idle_s <= threading.TIMEOUT_MAX  # on Windows 49 days
                    is_unused = not broker.changed.wait(idle_s if can_wait else None)
                wanted, self._wanted = self._wanted, None
            first = broker.next_model or wanted
            if broker.is_closed:
                return None
            if first is not None:
                return first, first == wanted
            if is_unused:
                self._free()

    def _make_ready(self, model: Path, *, is_prepared: bool) -> None:
        if self.broker.state.model != model or self._engine.info is None:
            self._free()
            self._load_model(model, lambda: self.broker.is_closed or not (is_prepared or self.broker.is_wanted(model)))
            self.broker.model_is(model)
            self._on_model(model)

    def _free(self) -> None:
        with self.broker.changed:
            if self._kept is not None and self._kept[0] == self.broker.state.model:
                self._kept = None  # what was said of one that is about to be loaded holds
        self.broker.free()
        self.broker.model_is(None)
        self._on_model(None)
        self._engine.unload()

    def _failed(self, model: Path, error: BaseException) -> None:
        """Nobody who waits for this model gets an answer; the next request may."""
        if isinstance(error, RequestCancelled):  # closed, or all have gone, while the model was loaded
            failure = closing().error
        else:
            log_failure(error, "answering a request")
            failure = as_engine_error(error, "answering a request")
        self.broker.refuse(failure, model)
        try:
            self._free()
        except BaseException as again:
            log_failure(again, "freeing the model")
