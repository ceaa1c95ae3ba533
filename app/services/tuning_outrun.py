"""What overtakes a tuning: other hardware, or a model that runs faster than it was timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from app.services.device_monitor import DeviceMonitor
from app.services.engine_client import EngineClient
from engine.common.config import EngineConfig
from engine.hardware.probe import Probe
from engine.protocol import Finished
from engine.tuning.result import TuningResult


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
