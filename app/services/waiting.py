"""What the last tokens waited for, and what would help, of a history."""

from __future__ import annotations

import os

import psutil

from app.services.history.history import History
from engine.hardware.sensors import SensorSample
from engine.model_info import ModelInfo
from engine.telemetry.advice import Advice, Running, advise
from engine.telemetry.analysis import Waiting, waiting
from engine.telemetry.lanes import DECODE
from engine.telemetry.messages import CacheReport

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
    waited: Waiting, report: CacheReport | None, model: ModelInfo | None, sample: SensorSample | None
) -> Advice | None:
    """The change that would help most; None while no model is loaded."""
    if model is None:
        return None
    vram = ram = 0
    if sample is not None:
        vram = sum(max(0, (gpu.vram_total or 0) - (gpu.vram_used or 0)) for gpu in sample.gpus)
        ram = max(0, (sample.ram_total or 0) - (sample.ram_used or 0))
    running = Running(model.precision, model.threads, max(_CORES, model.threads), vram, ram)
    return advise(waited, report, running)
