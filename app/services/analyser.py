"""What the last tokens waited for, and what would help, analysed in the background from a history."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import psutil
from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.common.model_info import ModelInfo
from engine.protocol import CacheReport

if TYPE_CHECKING:
    from app.services.history.history import History
    from engine.hardware.sensors import SensorSample
    from engine.telemetry.analysis import Waiting
    from engine.telemetry.records import Records
    from engine.tuning.advice import Advice, PlannedSpeed

WAITING_TOKENS = 200
_EVERY_S, _FIRST_EVERY_S = 8.0, 1.0
_CORES = psutil.cpu_count(logical=False) or os.cpu_count() or 1

_PROMPTS_NS = 600_000_000_000
"""Before a stretch of tokens their prompts were read."""
_SAMPLED_NS, _SAMPLES = 2_000_000_000, 40
"""A range this long contains some sensor samples."""


@dataclass(frozen=True, slots=True)
class Machine:
    model: ModelInfo | None = None
    config: EngineConfig | None = None
    report: CacheReport | None = None
    sample: SensorSample | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    waiting: Waiting
    advice: Advice | None


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """A snapshot of the last steps and their spans, independent of the growing history.

    Attributes:
        others: share of the CPU used by other programs, 0 to 1; 0 if no sensor reported it.
        pictures: spans of those that were read for these steps' requests.
    """

    steps: Records
    spans: Records
    others: float
    is_batch: bool
    pictures: Records


class Analyser(QObject):
    """Analyses again when there is new data, at a limited rate.  On the GUI thread, except for the analysis itself.

    Signals: `analysed(Findings)`.
    """

    analysed = Signal(object)

    def __init__(self, clock_ns: Callable[[], int], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._clock_ns = clock_ns
        self._working = LatestTask(self)
        self._is_news = self._is_hurried = False
        self._due_s = 0.0

    def close(self) -> None:
        self._working.close()

    def note_news(self) -> None:
        self._is_news = True

    def hurry(self) -> None:
        self._is_news = self._is_hurried = True
        self._due_s = 0.0

    def analyse(self, history: History, machine: Machine) -> None:
        """Starts if there is new data and the interval has passed; cheap otherwise.  No data gives no findings."""
        if not self._is_news or self._working.is_busy or self._clock_ns() / 1e9 < self._due_s:
            return
        self._is_news = False
        stretch = last_stretch(history, WAITING_TOKENS)
        if stretch is not None:
            self._working.ask(lambda: _findings(stretch, machine), self._on_found)

    def _on_found(self, findings: Findings) -> None:
        if not self._is_hurried:  # else the next tokens count as new data anyway
            is_full = findings.waiting.tokens >= WAITING_TOKENS  # few tokens take little time, and each one matters
            self._due_s = self._clock_ns() / 1e9 + (_EVERY_S if is_full else _FIRST_EVERY_S)
        self._is_hurried = False
        self.analysed.emit(findings)


def waiting_for_last(history: History, tokens: int) -> Waiting:
    """What the last steps of a chat or a batch waited for, as far as their spans are still kept.

    Includes other programs' CPU use in that time, as far as sensors reported it.
    """
    from engine.telemetry.analysis import Waiting

    stretch = last_stretch(history, tokens)
    return Waiting(0, 0.0, {}) if stretch is None else _waiting_in(stretch)


def last_stretch(history: History, tokens: int) -> Stretch | None:
    """The last steps, of a chat or a batch, that decoded this many tokens; None if there are none with spans."""
    import numpy as np

    from app.services.history.history import of_last_kind
    from engine.telemetry.lanes import BATCH_STEP

    steps = of_last_kind(history.last_steps(tokens + 50))[-tokens:]  # prefills are in between
    if len(steps):  # a batch step decodes many tokens
        enough = int(np.searchsorted(np.cumsum(steps["tokens"][::-1]), tokens)) + 1
        steps = steps[-enough:]
    since = history.spans_since_ns
    if since is None:
        return None
    steps = steps[steps["start_ns"] >= since]
    if not len(steps):
        return None
    start_ns, end_ns = int(steps["start_ns"].min()), int(steps["end_ns"].max())
    spans, is_batch = history.spans_between(start_ns, end_ns), int(steps["name"][-1]) == BATCH_STEP
    # They are read with prompts, which lie before the tokens that answer them.
    earlier = history.pictures_between(max(since, start_ns - _PROMPTS_NS), end_ns)
    pictures = earlier[np.isin(earlier["request"], np.unique(steps["request"]))]
    return Stretch(steps, spans, others_between(history, start_ns, end_ns), is_batch, pictures)


def others_between(history: History, start_ns: int, end_ns: int) -> float:
    """Share of the CPU used by other programs, 0 to 1; 0 if no sensor reported it."""
    import numpy as np

    edges = np.linspace(min(start_ns, end_ns - _SAMPLED_NS), end_ns, _SAMPLES + 1)
    taken = history.gauge("cpu_all", edges) - history.gauge("cpu_ours", edges)
    known = taken[np.isfinite(taken)]
    return float(np.clip(known.mean(), 0.0, 1.0)) if len(known) else 0.0


def _findings(stretch: Stretch, machine: Machine) -> Findings:
    waited = _waiting_in(stretch)
    return Findings(waited, _advice(waited, machine))


def _waiting_in(stretch: Stretch) -> Waiting:
    from engine.telemetry.analysis import waiting

    found = waiting(stretch.spans, stretch.steps)
    took_ns = int((stretch.pictures["end_ns"] - stretch.pictures["start_ns"]).sum())
    return replace(
        found,
        steps=len(stretch.steps),
        is_batch=stretch.is_batch,
        others=stretch.others,
        pictures=len(stretch.pictures),
        pictures_s=took_ns / 1e9,
    )


def _advice(waited: Waiting, machine: Machine) -> Advice | None:
    from engine.planner.predict import running_config
    from engine.tuning.advice import Running, advise

    model, sample, asked = machine.model, machine.sample, machine.config
    if model is None:
        return None
    vram = ram = 0
    if sample is not None:
        vram = sum(max(0, (gpu.vram_total or 0) - (gpu.vram_used or 0)) for gpu in sample.gpus)
        ram = max(0, (sample.ram_total or 0) - (sample.ram_used or 0))
    running = Running(model.precision, model.threads, max(_CORES, model.threads), vram, ram)
    planned = _planned_speed(running_config(model, asked, None), model.name) if asked is not None else None
    return advise(waited, machine.report, running, planned)


@lru_cache(maxsize=4)
def _planned_speed(config: EngineConfig, name: str) -> PlannedSpeed | None:
    """The plan of a loaded model on this machine; None if the planner has none.  Slow the first time.

    Args:
        name: of the model, in case its folder has been moved.
    """
    from app.services.predicted_timeline import shape_of
    from engine.tuning.advice import PlannedSpeed
    from engine.tuning.machine_state import machine_for

    try:
        return PlannedSpeed(machine_for(config), shape_of(config, name), config)
    except EngineError:
        return None
