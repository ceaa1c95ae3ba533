"""Loads the user's model, now or when somebody needs it, and puts it aside while nobody does.

It is located off the GUI thread, then loaded by the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Signal

from app.services.background import LatestTask, sentence_of, timer
from app.services.engine_client import EngineClient
from app.services.engine_part import is_needed
from app.services.engine_request import Request
from app.services.settings import Settings
from engine.common.errors import EngineError, ErrorCode
from engine.common.settings import STARTER
from engine.protocol import Failed, TerminalEvent

GIVES_WAY_MS = 60_000
"""A program that asked for room is refused after that."""


class ModelStart(QObject):
    """Signals:
    starter_missing: the starter model is needed, and not on this machine yet.
    problem(str): one sentence on why no model was loaded.
    aside_changed: `is_aside` is another.
    loads(Request): a model is being loaded.

    Attributes:
        make_room: frees what may be freed before a model is loaded, then calls what it is given.
    """

    starter_missing = Signal()
    problem = Signal(str)
    aside_changed = Signal()
    loads = Signal(object)

    def __init__(self, client: EngineClient, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._client = client
        self._settings = settings
        self._looking = LatestTask(self)
        self._load: Request | None = None
        self._is_put_off = self._gives_way = False
        self.aside = ""
        self.make_room: Callable[[Callable[[], None]], None] = lambda then: then()
        self._unused = timer(self, self._on_unused, once=True)
        settings.changed.connect(self._on_setting)
        client.model_loaded.connect(lambda _model: self.is_used())
        client.answered.connect(lambda _event: self.is_used())
        client.state_changed.connect(lambda _state: self._give_way())

    def begin(self) -> None:
        """Starts the engine and loads the default model; the latest choice wins."""
        self._is_put_off = False
        self._client.start()
        model = self._settings.default_model
        self._looking.ask(lambda: _resolve(model), self._begin_load, lambda error: self._on_not_found(model, error))

    def put_off(self) -> None:
        """Starts the engine alone, for who asks other servers: the default model is loaded once it is needed."""
        self._is_put_off = True
        self._client.start(at_once=False)

    @property
    def is_aside(self) -> bool:
        """Whether `need` would load a model."""
        return self._is_put_off or bool(self.aside)

    def need(self) -> None:
        """Somebody waits for a model on this PC: loads the one that was put aside, or the default one that was put
        off."""
        if self.aside:
            self.open(self.aside)
            return
        if not self._is_put_off:
            return
        if is_needed():
            self.starter_missing.emit()
        else:
            self.begin()

    def open(self, model: str) -> None:
        """Loads the model at a path for now, if it is one: else the one that is loaded stays."""
        self._looking.ask(lambda: _checked(model), self._begin_load, lambda error: self._on_not_found(model, error))

    def reload(self) -> None:
        config = self._client.config
        if config is not None:
            self.open(config.model)

    def cancel(self) -> None:
        """Stops loading; no model is loaded then, as the one before has made room."""
        self._looking.forget()
        if self._load is not None:
            self._load.cancel()

    def unload(self) -> None:
        """Frees the memory of the model, once the answer that is being written has ended."""
        self._looking.forget()
        self._set_aside("")
        self._client.unload()

    def is_used(self) -> None:
        """Somebody uses the model: it stays for as long as the settings say."""
        minutes = self._settings.idle_minutes
        self._unused.start(minutes * 60_000) if minutes else self._unused.stop()

    def give_way(self) -> None:
        """Puts the model aside as soon as it is unused: a program asks for one that does not fit beside it."""
        self._gives_way = True
        QTimer.singleShot(GIVES_WAY_MS, self, self._stay)
        self._give_way()

    def _give_way(self) -> None:
        if self._gives_way and self._client.is_idle:
            self._gives_way = False
            self._put_aside()

    def _stay(self) -> None:
        self._gives_way = False

    def _on_unused(self) -> None:
        if self._client.is_idle:
            self._put_aside()
        else:
            self.is_used()

    def _put_aside(self) -> None:
        config = self._client.config
        if config is not None and self._client.model is not None:
            self._client.unload()
            self._set_aside(config.model)

    def _set_aside(self, model: str) -> None:
        if model != self.aside:
            self.aside = model
            self.aside_changed.emit()

    def restart(self) -> None:
        """Restarts the engine with the model requested last, or else the default one."""
        load = self._client.restart()
        if load is not None:
            self._follow(load)
        elif not self._is_put_off:  # it died before any model was requested, or after it was unloaded
            self.begin()

    def close(self) -> None:
        self._looking.close()

    def _on_setting(self, key: str) -> None:
        if key == "serve_others" and self._settings.serves_others:
            self.need()  # other programs ask for the model that is loaded here
        elif key == "idle_minutes":
            self.is_used()

    def _begin_load(self, path: Path) -> None:
        def begin() -> None:
            self._follow(self._client.load(self._settings.engine(str(path))))
            self._set_aside("")

        self._is_put_off = False
        self.make_room(begin)

    def _follow(self, load: Request) -> None:
        self._load = load
        load.finished.connect(self._on_finished)
        self.loads.emit(load)

    def _on_not_found(self, model: str, error: Exception) -> None:
        if model == STARTER and isinstance(error, EngineError) and error.code is ErrorCode.MODEL_NOT_FOUND:
            self.starter_missing.emit()
        else:
            self.problem.emit(sentence_of(error))

    def _on_finished(self, event: TerminalEvent) -> None:
        if self._load is not None and self._load.id == event.request_id:  # else another was requested meanwhile
            self._load = None
        # The end of the engine is reported once, by the banner that offers to restart it.
        if isinstance(event, Failed) and event.code is not ErrorCode.ENGINE_DIED:
            self.problem.emit(event.message)


def _resolve(model: str) -> Path:
    from engine.checkpoint.library import resolve  # takes 0.1 s: not before the window opens

    return resolve(model)


def _checked(model: str) -> Path:
    from engine.checkpoint.importing import weights_of

    path = _resolve(model)
    weights_of(path)
    return path
