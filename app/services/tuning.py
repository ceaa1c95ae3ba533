"""Tuning runs for the window: one at a time, cancellable, with the last result; and quick timings of a model.

And what overtakes a tuning: other hardware, or a model that runs faster than it was timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask, TaskQueue
from app.services.device_monitor import DeviceMonitor
from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import Request, TuningRun
from app.services.model_start import ModelStart
from app.services.settings import Settings
from engine.common.config import EngineConfig, SamplingParams
from engine.hardware.probe import Probe
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
from engine.tuning.result import TuningKind, TuningResult

if TYPE_CHECKING:
    from engine.hardware.measured import Measurements
    from engine.tuning.machine_state import MachineLook

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
        from engine.tuning.saved_results import save_result

        kept = replace(result, winner=name)

        def loaded(_path: object) -> None:
            if self._run is None:
                self._client.load(self._settings.engine(result.asked.model))
            self.chosen.emit(name)

        self._keeping.add(lambda: save_result(kept), loaded, self._on_failed)

    def keep_anyway(self, result: TuningResult | None, measurements: Measurements | None) -> None:
        """Saves what a run did not save because other programs were busy, and loads the model with it."""
        from engine.tuning.saved_results import keep_anyway

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


def look_at_machine(setting: str, device: str | None) -> MachineLook:
    from engine.tuning.machine_state import look_at_machine as look  # imports numpy, which the start need not

    return look(setting, device)


def _latest(model: str) -> TuningResult | None:
    from engine.checkpoint.names import resolve
    from engine.tuning.saved_results import model_mark, results_of

    return next(iter(results_of(model_mark(resolve(model)))), None)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"The choice could not be saved: {error.strerror or error}."
    return str(getattr(error, "message", error))


class HardwareChange(QObject):
    """Compares the detected hardware with the tuned one, off the GUI thread.

    Signals: `noticed(tuple[str, ...])`: the changes, as sentences; only if there are any.
    """

    noticed = Signal(object)

    def __init__(self, devices: DeviceMonitor, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._comparing = LatestTask(self)
        devices.hardware_found.connect(self._compare)

    def close(self) -> None:
        self._comparing.close()

    def _compare(self, probe: Probe) -> None:
        self._comparing.ask(lambda: _changes(probe), self._on_compared)

    def _on_compared(self, changed: tuple[str, ...]) -> None:
        if changed:
            self.noticed.emit(changed)


def _changes(probe: Probe) -> tuple[str, ...]:
    from engine.tuning.machine_state import changes_since  # imports the planner, too slow for start-up

    gpu = probe.compute_gpu
    return changes_since(probe, probe.card_device if gpu is not None and gpu.total_bytes else "")


_FEWEST_TOKENS = 24
"""Minimum length of an answer whose rate is meaningful."""


class TuningOutrun(QObject):
    """Compares answers with the tuned speed, off the GUI thread.

    Signals: `noticed(TuningResult)`: it was timed while something slowed the machine down, and is now marked so.
    """

    noticed = Signal(object)

    def __init__(
        self,
        client: EngineClient,
        parent: QObject | None = None,
        *,
        check: Callable[[str, EngineConfig, float], TuningResult | None] | None = None,
    ) -> None:
        super().__init__(parent)
        self._client, self._check = client, check or _check
        self._fastest = 0.0
        self._checking = LatestTask(self)
        client.model_loaded.connect(self._forget)
        client.answered.connect(self._on_answered)

    def close(self) -> None:
        self._checking.close()

    def _forget(self, _model: object) -> None:
        self._fastest = 0.0

    def _on_answered(self, event: Finished) -> None:
        model, config = self._client.model, self._client.config
        if model is None or config is None or not model.is_tuned:
            return
        rate = event.tokens_per_s
        # Only a new maximum can exceed the tuned speed further.
        if self._checking.is_busy or event.generated_tokens < _FEWEST_TOKENS or rate <= self._fastest:
            return
        self._fastest = rate
        self._checking.ask(lambda: self._check(model.path, config, rate), self._on_checked)

    def _on_checked(self, result: TuningResult | None) -> None:
        if result is not None:
            self.noticed.emit(result)


def _check(path: str, config: EngineConfig, tokens_per_s: float) -> TuningResult | None:
    from engine.tuning.saved_results import note_outrun  # imported late: not needed at start-up

    return note_outrun(Path(path), config, tokens_per_s)
