"""What the last tokens waited for, and what would help, of a history."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache

import numpy as np
import psutil

from app.services.history.history import History
from app.services.predicted_timeline import config_of, machine_and_shape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.common.model_info import ModelInfo
from engine.hardware.sensors import SensorSample
from engine.telemetry.advice import Advice, Running, advise
from engine.telemetry.analysis import Waiting, waiting
from engine.telemetry.lanes import BATCH_STEP, DECODE
from engine.telemetry.messages import CacheReport
from engine.telemetry.planned_speed import PlannedSpeed
from engine.telemetry.records import Records

_CORES = psutil.cpu_count(logical=False) or os.cpu_count() or 1

_SAMPLED_NS, _SAMPLES = 2_000_000_000, 40
"""Of at least so long a stretch some samples of the machine's sensors are known."""


def of_last_kind(steps: Records) -> Records:
    """Of these steps those that made tokens: of a chat, or of a batch, whichever came last."""
    made = steps[np.isin(steps["name"], (DECODE, BATCH_STEP)) & (steps["tokens"] > 0)]
    return made[made["name"] == made["name"][-1]] if len(made) else made


def waiting_for_last(history: History, tokens: int) -> Waiting:
    """What the last steps waited for, of a chat or of a batch, as far as their spans are still there.

    With it what other programs took of the processor meanwhile, as far as sensors have told.
    """
    steps = of_last_kind(history.last_steps(tokens + 50))[-tokens:]  # prefills lie between
    if len(steps):  # a step of a batch makes many
        enough = int(np.searchsorted(np.cumsum(steps["tokens"][::-1]), tokens)) + 1
        steps = steps[-enough:]
    since = history.spans_since_ns
    if not len(steps) or since is None:
        return Waiting(0, 0.0, {})
    steps = steps[steps["start_ns"] >= since]
    if not len(steps):
        return Waiting(0, 0.0, {})
    start_ns, end_ns = int(steps["start_ns"].min()), int(steps["end_ns"].max())
    found = waiting(history.spans_between(start_ns, end_ns), steps)
    is_batch = int(steps["name"][-1]) == BATCH_STEP
    return replace(found, steps=len(steps), is_batch=is_batch, others=others_between(history, start_ns, end_ns))


def others_between(history: History, start_ns: int, end_ns: int) -> float:
    """Share of the processor that other programs took, 0 to 1; 0 where no sensor told."""
    edges = np.linspace(min(start_ns, end_ns - _SAMPLED_NS), end_ns, _SAMPLES + 1)
    taken = history.gauge("cpu_all", edges) - history.gauge("cpu_ours", edges)
    known = taken[np.isfinite(taken)]
    return float(np.clip(known.mean(), 0.0, 1.0)) if len(known) else 0.0


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
