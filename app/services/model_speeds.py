"""How fast models on this PC would answer, predicted one after the other off the GUI thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from app.services.settings import Settings
from engine.common.settings import kept_settings

SOON_MS = 50
"""What shows speeds waits so long for further ones: those that are known come all at once."""


class ModelSpeeds(QObject):
    """Predicts each model once; what was timed here by Tune is taken as it is.

    Signals: `found(str, float, bool)`: a checkpoint's path, decode tokens per second, whether they were measured.
    """

    found = Signal(str, float, bool)

    def __init__(self, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self._task = LatestTask(self)
        self._stopping = threading.Event()
        self._known: dict[str, tuple[float, bool]] = {}
        self.found.connect(self._keep)
        settings.changed.connect(self._on_setting)

    def ask(self, paths: Iterable[str]) -> None:
        """Emits the speeds of these models as they become known; nothing for those that cannot be planned."""
        wanted = list(paths)
        for path in wanted:
            if path in self._known:
                self.found.emit(path, *self._known[path])
        missing = [path for path in wanted if path not in self._known]
        if missing:
            self._stopping.set()  # an older request ends after the model that it is at
            self._stopping = stopping = threading.Event()
            self._task.ask(lambda: self._predict(missing, stopping))

    def close(self) -> None:
        """Stops, and waits for the model that is being planned."""
        self._stopping.set()
        self._task.close()

    def _on_setting(self, key: str) -> None:
        setting = kept_settings().get(key)
        if setting is not None and setting.applies == "load":
            self._known.clear()

    def _keep(self, path: str, tokens_per_s: float, is_measured: bool) -> None:
        self._known[path] = (tokens_per_s, is_measured)

    def _predict(self, paths: list[str], stopping: threading.Event) -> None:
        from app.services.planning import PlanQuestion, answer  # imports the planner, too slow for start-up
        from engine.tuning.machine_state import look_at_machine

        look = look_at_machine(self._settings.engine("").device)
        for path in paths:
            if stopping.is_set():
                return
            plan = answer(PlanQuestion(look, self._settings.engine(path))).plan
            if plan is not None:
                self.found.emit(path, plan.speed.decode_tokens_per_s, bool(plan.speed.timed_at))
