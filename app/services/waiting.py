"""What the last tokens waited for, and what would help, of a history."""

from __future__ import annotations

import os
from functools import lru_cache

import psutil

from app.services.history.history import History
from app.services.predicted_timeline import config_of, machine_and_shape
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.hardware.sensors import SensorSample
from engine.model_info import ModelInfo
from engine.telemetry.advice import Advice, Running, advise
from engine.telemetry.analysis import Waiting, waiting
from engine.telemetry.lanes import DECODE
from engine.telemetry.messages import CacheReport
from engine.telemetry.planned_speed import PlannedSpeed

_CORES = psutil.cpu_count(logical=False) or os.cpu_count() or 1


def waiting_for_last(history: History, tokens: int) -> Waiting:
    """What the last decode steps waited for, as far as their spans are still there."""
    steps = history.last_steps(tokens + 50)  # prefills lie between
    steps = steps[steps["name"] == DECODE][-tokens:]
    since = history.spans_since_ns
    if not len(steps) or since is None:
        return Waiting(0, 0.0, {})
    steps = steps[steps["start_ns"] >= since]
    if not len(steps):
        return Waiting(0, 0.0, {})
    spans = history.spans_between(int(steps["start_ns"].min()), int(steps["end_ns"].max()))
    return waiting(spans, steps)


def advice_for(
    waited: Waiting,
    report: CacheReport | None,
    model: ModelInfo | None,
    sample: SensorSample | None,
    asked: EngineConfig | None = None,
) -> Advice | None:
    """The change that would help most; None while no model is loaded.

    Args:
        asked: with which settings the model was loaded; without them there is no plan to ask.
    """
    if model is None:
        return None
    vram = ram = 0
    if sample is not None:
        vram = sum(max(0, (gpu.vram_total or 0) - (gpu.vram_used or 0)) for gpu in sample.gpus)
        ram = max(0, (sample.ram_total or 0) - (sample.ram_used or 0))
    running = Running(model.precision, model.threads, max(_CORES, model.threads), vram, ram)
    planned = planned_speed(config_of(model, asked, None), model.name) if asked is not None else None
    return advise(waited, report, running, planned)


@lru_cache(maxsize=4)
def planned_speed(config: EngineConfig, name: str) -> PlannedSpeed | None:
    """The plan of a loaded model on this machine; None where the planner cannot tell.  Slow the first time.

    Args:
        name: of the model, for when its folder has been moved.
    """
    try:
        return PlannedSpeed(*machine_and_shape(config, name), config)
    except EngineError:
        return None
