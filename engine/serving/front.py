"""The HTTP server's process behind the window's switch: `python -m engine.serving.front`.

It is told on stdin where to listen and what the window has, and says on stdout what happens.  It ends with stdin.  What
is asked of the window's model is answered by the window's engine, where chats come first.  Other models are loaded by
an engine beside it, one at a time, within the memory that is free, so that no program takes a model from its user.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.library import LibraryEntry, describe
from engine.checkpoint.names import name_of
from engine.common.channel import Channel
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.process.lifetime import log_to_file
from engine.process.streams import claimed_pipes
from engine.protocol import (
    Ask,
    Began,
    Beside,
    Failed,
    FreeOthers,
    Listen,
    Listening,
    Message,
    Rules,
    Wants,
    decode,
    encode,
)
from engine.serving.engine_process import EngineProcess
from engine.serving.link import EngineLink, Event, State, Ticket
from engine.serving.service import LibraryModels

_PATIENCE_S = 20.0
"""The engine comes once it has done what it is doing."""
_LOAD_S = 600.0
_ROOM_S, _LOOKS_S = 60.0, 0.25
"""The window frees its model once what is being written there has ended."""


_log = logging.getLogger(__name__)


def no_engine() -> None:
    """Raises EngineError `ENGINE_DIED`: the window starts engines, and nobody here can have it do so."""
    raise EngineError(ErrorCode.ENGINE_DIED, "Switchyard's engine is busy or not running: look at its window.")


class EngineRouter:
    """The window's engine and the one beside it; see `Answerer`.

    Args:
        say: tells the window.
    """

    def __init__(self, say: Callable[[Message], None]) -> None:
        self._say = say
        self.window = EngineLink()
        self.window.wake = no_engine
        self.window.on_model = lambda _model, _loading: self._notify()
        self.beside = EngineProcess(EngineConfig(""), None, lambda: _log.warning("the engine stopped"))
        self.beside.on_model = self._on_beside
        self.beside.on_remark = lambda text: _log.info("%s", text)
        self.beside.on_gone = lambda: self._show("")
        self._changed = threading.Condition()
        self._rules = Rules("", is_loading=False, config=EngineConfig(""))
        self._shown = Beside("")

    def start(self) -> None:
        self.window.start()
        self.beside.start()

    def close(self) -> None:
        self.beside.expect_end()
        self.window.close()
        self.beside.close()

    # --- what the window says ---------------------------------------------------------------------

    def follow(self, rules: Rules) -> None:
        """From now on these hold; models that are loaded already keep how they are run."""
        before, self._rules = self._rules, rules
        self.beside.order = replace(self.beside.order, config=rules.config, idle_s=rules.idle_s)
        if before.config != rules.config:
            self.beside.stop_if_idle()
        elif before.idle_s != rules.idle_s and (model := self.beside.state.model) is not None:
            self.beside.release(model, -1 if rules.idle_s is None else rules.idle_s)
        self._notify()

    def windows_model(self) -> Path | None:
        """The one that the window has, after waiting for it if it is coming; None if it has none."""
        with self._changed:
            if self._rules.wakes:
                self._say(Wants("model"))
            self._changed.wait_for(lambda: self.window.state.model is not None or self.coming is None, _LOAD_S)
            # The window may say that it is loaded before its engine does.
            self._changed.wait_for(lambda: self.window.state.model is not None or not self._rules.window, _PATIENCE_S)
        if not self.window.knows_model.wait(_PATIENCE_S):
            no_engine()
        return self.window.state.model

    @property
    def coming(self) -> Path | None:
        """The model that the window is loading, or loads when it is asked for."""
        return Path(self._rules.window) if self._rules.is_loading or self._rules.wakes else None

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- what programs ask ------------------------------------------------------------------------

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        return self._asked(self._link_for(ask.model), ask, on_event)

    def release(self, model: Path, after_s: float = 0) -> None:
        """See `Answerer`; the window's user frees the window's."""
        if not self._is_windows(model):
            self.beside.release(model, after_s)

    @property
    def state(self) -> State:
        ours, theirs = self.window.state, self.beside.state
        return State(ours.model, ours.under_way + theirs.under_way, ours.waiting + theirs.waiting)

    def _is_windows(self, model: Path) -> bool:
        return model == self.window.state.model

    def _link_for(self, model: Path) -> EngineLink:
        if self._is_windows(model):
            return self.window
        if not self._shown.model:
            self._show(name_of(model), is_loading=True)
        return self.beside

    def _asked(self, link: EngineLink, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        """Asks there, and once more if it is refused before it has begun for a reason that may pass: the window has
        another model now, or there is no room beside the window's."""
        inner: Ticket | None = None
        outer = Ticket(ask, on_event, lambda: inner.cancel() if inner is not None else None)
        is_last = False
        again_after = ErrorCode.MODEL_NOT_FOUND if link is self.window else ErrorCode.NOT_ENOUGH_MEMORY

        def told(event: Event) -> None:
            nonlocal is_last
            passes = isinstance(event, Failed) and event.code is again_after and not is_last
            is_last = is_last or isinstance(event, Began)
            if passes and not outer.is_cancelled():
                is_last = True
                threading.Thread(target=again, args=(event,), name="asking-again", daemon=True).start()
            else:
                outer.tell(event)

        def again(refused: Event) -> None:
            nonlocal inner
            if link is self.beside and not self._room_was_made():
                outer.tell(refused)
                return
            try:
                inner = self._link_for(ask.model).ask(ask, told)
            except EngineError as error:
                outer.tell(Failed.of(error))
            if outer.is_cancelled() and inner is not None:
                inner.cancel()

        inner = link.ask(ask, told)
        return outer

    def _room_was_made(self) -> bool:
        """Whether the window freed its model for a program's, which it is asked to if its user allows that."""
        with self._changed:
            if not (self._rules.gives_way and self._rules.window):
                return False
            until_s = time.monotonic() + _ROOM_S
            while self.window.state.under_way and time.monotonic() < until_s:
                self._changed.wait(_LOOKS_S)
            self._say(Wants("room"))
            return self._changed.wait_for(lambda: self.window.state.model is None, _ROOM_S)

    # --- what the window is shown -----------------------------------------------------------------

    def _on_beside(self, model: Path | None, loading: Path | None) -> None:
        if model is not None:
            self._show(name_of(model))
        elif loading is not None:
            self._show(name_of(loading), is_loading=True)
        elif not self.beside.state.under_way:
            self.beside.stop_if_idle()

    def _show(self, model: str, *, is_loading: bool = False) -> None:
        with self._changed:
            shown = Beside(model, is_loading)
            if shown != self._shown:
                self._shown = shown
                self._say(shown)


class WindowModels(LibraryModels):
    """The window's model, and all others on this machine."""

    def __init__(self, engines: EngineRouter) -> None:
        super().__init__()
        self._engines = engines
        self._own: LibraryEntry | None = None

    def listed(self) -> list[LibraryEntry]:
        """The window's first, if it has one."""
        entries, path = super().listed(), self._engines.window.state.model
        own = [entry for entry in entries if entry.path == path]
        if path is not None and not own:
            if self._own is None or self._own.path != path:
                self._own = describe(path, path.name)
            own = [self._own]
        return own + [entry for entry in entries if entry.path != path]

    def find(self, name: str) -> tuple[str, Path]:
        if name not in ("", "default"):
            for entry in self.listed():
                if name in (entry.name, entry.path.name):
                    if entry.path == self._engines.coming:
                        self._engines.windows_model()
                    return entry.name, entry.path
            return super().find(name)  # which says that there is none
        path = self._engines.windows_model()
        if path is None:
            raise EngineError(
                ErrorCode.MODEL_NOT_FOUND,
                "No model is loaded in Switchyard: choose one in its window, or ask for one by its name.",
            )
        return next((entry.name for entry in self.listed() if entry.path == path), path.name), path


def main() -> None:
    pipes = claimed_pipes()
    logging.captureWarnings(True)
    log_to_file("server.log", also_stderr=False)
    told: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    window = Channel(pipes, lambda line: told.put(decode(line)), lambda: told.put(None))
    window.start()
    if not isinstance(order := told.get(), Listen):  # the window is gone already
        return
    try:
        _serve(order, told, lambda message: window.send(encode(message)))
    except Exception:
        _log.exception("the server failed")
        raise
    finally:
        window.flush()


def _serve(order: Listen, told: queue.SimpleQueue[Message | None], say: Callable[[Message], None]) -> None:
    from engine.serving.server import Address, Server
    from engine.serving.service import Service

    engines = EngineRouter(say)
    server = Server(Service(engines, WindowModels(engines)), Address(order.host, order.port, order.key), say)
    try:
        port = server.start()
    except EngineError as error:
        _log.warning("%s", error.message)
        say(Failed.of(error))
        engines.close()
        return
    _log.info("listening at %s, port %d", order.host, port)
    engines.start()
    say(Listening(port, engines.window.address, engines.window.secret))
    while (message := told.get()) is not None:
        if isinstance(message, Rules):
            engines.follow(message)
        elif isinstance(message, FreeOthers):
            engines.beside.stop_if_idle()
    server.stop()
    engines.close()
    _log.info("ended")


if __name__ == "__main__":
    main()
