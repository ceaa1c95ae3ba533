"""Loading the model that the user has chosen: found off the GUI thread, then loaded by the engine."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.services.background import BackgroundCall
from app.services.engine_client import EngineClient
from app.services.settings import STARTER, Settings
from engine.config import EngineConfig
from engine.errors import EngineError, ErrorCode
from engine.protocol import Failed, ModelLoaded


class ModelStart(QObject):
    """Signals:
    starter_missing: the model wanted is the starter, and it is not on this machine yet.
    problem(str): one sentence on why no model was loaded.
    loaded: the model is there.
    """

    starter_missing = Signal()
    problem = Signal(str)
    loaded = Signal()

    def __init__(self, client: EngineClient, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._client = client
        self._settings = settings
        self._looking: BackgroundCall | None = None
        self._again = False
        self._request = ""
        client.finished.connect(self._on_finished)

    def begin(self) -> None:
        """Starts the engine and loads the default model; a call during another one counts after it."""
        self._client.start()
        if self._looking is not None:
            self._again = True
            return
        model = self._settings.default_model
        self._looking = BackgroundCall(lambda: _resolve(model), self)
        self._looking.done.connect(self._load)
        self._looking.failed.connect(lambda error: self._on_not_found(model, error))
        self._looking.start()

    def close(self) -> None:
        """Waits for a search under way."""
        if self._looking is not None:
            self._looking.wait()

    def _load(self, path: Path) -> None:
        if self._ended_and_again():
            return
        self._request = self._client.load(wanted_config(self._settings, str(path)))

    def _on_not_found(self, model: str, error: Exception) -> None:
        if self._ended_and_again():
            return
        if model == STARTER and isinstance(error, EngineError) and error.code is ErrorCode.MODEL_NOT_FOUND:
            self.starter_missing.emit()
        elif isinstance(error, EngineError):
            self.problem.emit(error.message)
        else:
            raise error

    def _ended_and_again(self) -> bool:
        self._looking = None
        if self._again:
            self._again = False
            self.begin()
            return True
        return False

    def _on_finished(self, event: object) -> None:
        if isinstance(event, ModelLoaded):
            self.loaded.emit()
        elif isinstance(event, Failed) and event.request_id == self._request and not _is_death(event):
            self.problem.emit(event.message)


def wanted_config(settings: Settings, model: str) -> EngineConfig:
    """How the user wants a model to run: what the settings leave open, the engine or its tuning decides."""
    return EngineConfig(model=model, device=settings.device, threads=settings.threads)


def _is_death(event: Failed) -> bool:
    """The end of the engine process is told once, by the banner that offers to restart it."""
    return event.code is ErrorCode.ENGINE_DIED


def _resolve(model: str) -> Path:
    from engine.checkpoint.library import resolve  # it costs a tenth of a second, after the window

    return resolve(model)
