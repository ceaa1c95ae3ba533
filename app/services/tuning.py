"""Tuning runs for the window: one at a time, cancellable, with the last result; and quick timings of a model."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask, TaskQueue
from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import Request, TuningRun
from app.services.model_start import ModelStart
from app.services.settings import Settings
from engine.common.config import SamplingParams
from engine.hardware.measured import Measurements
from engine.protocol import (
    ChatMessage,
    Failed,
    Finished,
    ModelLoaded,
    Stage,
    TerminalEvent,
    TuningFinished,
    TuningMeasured,
    TuningProgress,
    Until,
)
from engine.tuning.machine_state import MachineLook, look_at_machine
from engine.tuning.result import TuningKind, TuningResult
from engine.tuning.saved_results import keep_anyway, model_mark, results_of, save_result

_PROMPT = "Tell a calm story about a lighthouse."
_TOKENS = 64


class SpeedTest(QObject):
    """Signals:
    began.
    ended(float, str): tokens per second, and what went wrong in a sentence; 0 and nothing if it was stopped.
    """

    began = Signal()
    ended = Signal(float, str)

    def __init__(self, client: EngineClient, start: ModelStart, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._client, self._start = client, start
        self._request: Request | None = None
        self._is_waiting = False
        start.loads.connect(self._on_loads)
        start.problem.connect(self._on_problem)

    @property
    def is_running(self) -> bool:
        return self._is_waiting or self._request is not None

    def start(self) -> None:
        if not self.is_running:
            self._is_waiting = True
            self.began.emit()
            self._start.begin()

    def _on_loads(self, load: Request) -> None:
        if self._is_waiting:
            load.finished.connect(self._on_loaded)

    def _on_problem(self, sentence: str) -> None:
        if self._is_waiting:
            self._end(0.0, sentence)

    def _on_loaded(self, event: TerminalEvent) -> None:
        if not self._is_waiting:
            return
        if not isinstance(event, ModelLoaded):
            self._end(0.0, event.message if isinstance(event, Failed) else "")
            return
        self._is_waiting = False
        sampling = SamplingParams(temperature=0.0, max_tokens=_TOKENS, seed=1)
        self._request = self._client.generate([ChatMessage("user", _PROMPT)], sampling)
        self._request.finished.connect(self._on_answered)

    def _on_answered(self, event: Finished | Failed) -> None:
        self._end(event.tokens_per_s if isinstance(event, Finished) else 0.0, getattr(event, "message", ""))

    def _end(self, tokens_per_s: float, problem: str) -> None:
        self._is_waiting, self._request = False, None
        self.ended.emit(tokens_per_s, problem)


class Tuning(QObject):
    """Starts runs in the engine process and queries the machine, off the GUI thread.

    Signals:
        looked(MachineLook): the machine was queried, or measured.
        began, progressed(TuningProgress), measured(TuningMeasured), planned(TuningPlans), timed(TuningTimed).
        ended(TuningFinished | Failed): emitted after every run.
        recalled(TuningResult | None): the latest saved result of the requested model.
        chosen(str): the name of the plan now in use.
        problem(str): one sentence.
    """

    looked = Signal(object)
    began = Signal()
    progressed = Signal(object)
    measured = Signal(object)
    planned = Signal(object)
    timed = Signal(object)
    ended = Signal(object)
    recalled = Signal(object)
    chosen = Signal(str)
    problem = Signal(str)

    def __init__(self, client: EngineClient, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._client, self._settings = client, settings
        self.machine: MachineLook | None = None
        self.stage: Stage | None = None
        self._run: TuningRun | None = None
        self._device: str | None = None
        self.is_cancelling = False
        self._looking, self._recalling, self._keeping = LatestTask(self), LatestTask(self), TaskQueue(self)

    @property
    def is_running(self) -> bool:
        return self._run is not None

    @property
    def is_looking(self) -> bool:
        return self._looking.is_busy

    def look(self) -> None:
        setting, device = self._settings.engine("").device, self._device
        self._looking.ask(lambda: look_at_machine(setting, device), self._on_looked, self._on_failed)

    def start(self, model: str, kind: TuningKind, until: Until = "timed", *, measure_again: bool = False) -> None:
        if self._run is not None:
            return
        if self._client.state in (EngineState.STOPPED, EngineState.DIED):
            self._client.start()
        self.stage, self.is_cancelling = None, False
        config = self._settings.engine(model)
        self._run = run = self._client.start_tuning(config, kind, until, measure_again=measure_again)
        run.progressed.connect(self._on_progressed)
        run.measured.connect(self._on_measured)
        run.planned.connect(self.planned)
        run.timed.connect(self.timed)
        run.finished.connect(self._on_finished)
        self.began.emit()

    def cancel(self) -> None:
        """Cancels the run at its next step; `ended` follows once the previous model is reloaded."""
        if self._run is not None and not self.is_cancelling:
            self.is_cancelling = True
            self._run.cancel()

    def recall(self, model: str) -> None:
        self._recalling.ask(lambda: _latest(model), self.recalled.emit, self._on_failed)

    def use(self, result: TuningResult, name: str) -> None:
        kept = replace(result, winner=name)

        def loaded(_path: object) -> None:
            if self._run is None:
                self._client.load(self._settings.engine(result.asked.model))
            self.chosen.emit(name)

        self._keeping.add(lambda: save_result(kept), loaded, self._on_failed)

    def keep_anyway(self, result: TuningResult | None, measurements: Measurements | None) -> None:
        """Saves what a run did not save because other programs were busy, and loads the model with it."""

        def kept(_nothing: object) -> None:
            self.look()
            if result is None or not result.winner:
                return
            if self._run is None:
                self._client.load(self._settings.engine(result.asked.model))
            self.chosen.emit(result.winner)

        self._keeping.add(lambda: keep_anyway(result, measurements), kept, self._on_failed)

    def close(self) -> None:
        for task in (self._looking, self._recalling, self._keeping):
            task.close()

    # --- events of the engine ---------------------------------------------------------------------

    def _on_progressed(self, event: TuningProgress) -> None:
        self.stage = event.stage
        self.progressed.emit(event)

    def _on_measured(self, event: TuningMeasured) -> None:
        self._device = event.device
        self.measured.emit(event)
        self.look()

    def _on_finished(self, event: TuningFinished | Failed) -> None:
        self._run, self.stage, self.is_cancelling = None, None, False
        self.ended.emit(event)

    def _on_looked(self, look: MachineLook) -> None:
        self.machine = look
        self.looked.emit(look)

    def _on_failed(self, error: Exception) -> None:
        self.problem.emit(_sentence(error))


def _latest(model: str) -> TuningResult | None:
    from engine.checkpoint.names import resolve

    return next(iter(results_of(model_mark(resolve(model)))), None)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"The choice could not be saved: {error.strerror or error}."
    return str(getattr(error, "message", error))
