"""What the simulator predicts for a request that has run, as a past that can be shown beneath the real one.

Slow enough (tens of milliseconds, a second for the biggest models) to be asked for off the thread of a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from app.services.history.history import History
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.common.model_info import ModelInfo
from engine.formats import AUTO, is_precision, measured_as
from engine.telemetry.lanes import DECODE, PREFILL
from engine.telemetry.records import Records

if TYPE_CHECKING:
    from engine.checkpoint.model_shape import ModelShape
    from engine.hardware.machine import HardwareProfile

MOST_SPANS = 400_000
_MOST_STEPS = 4096
_CYCLE = 12
"""Decode steps at the end of a simulation that are repeated for a longer answer: by then its cache is warm."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What was asked, and how it was run.

    Attributes:
        config: with what is loaded in place of what was asked for.
        name: of the model, for whoever finds no folder of it.
        prompt_tokens, tokens: read, and decoded.
    """

    config: EngineConfig
    name: str
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Predicted:
    """A prediction.

    Attributes:
        history: of one request, its beginning at 0 ns.
        steps_ns: beginning of every decode step, [n].
        ttft_s: until the first token.
        tokens_per_s: after it.
        hit_rate: of the experts on the card; None without a card's cache.
        slots: experts on the card.
        measured, assumed: groups of numbers of the machine, by how they are known: `cpu`, `gpu`, `link`, `disk`.
    """

    shape: RequestShape
    history: History
    steps_ns: tuple[int, ...]
    ttft_s: float
    tokens_per_s: float
    hit_rate: float | None
    slots: int
    measured: tuple[str, ...]
    assumed: tuple[str, ...]


def predict(shape: RequestShape) -> Predicted:
    """Simulates the request on this machine, as its engine would run it.

    Raises:
        EngineError: the model is not on this machine any more, or does not fit on it so.
    """
    from engine.hardware.machine import Origin
    from engine.planner.predict import simulate_decode
    from engine.telemetry.predicted import predicted_records

    config = shape.config
    machine, model = machine_and_shape(config, shape.name)
    tokens = max(shape.tokens, 2)
    outcome, memory, _ = simulate_decode(
        machine, model, config, prompt_tokens=max(shape.prompt_tokens, 1), tokens=tokens, record=True
    )
    spans, steps = predicted_records(outcome.spans, first_layer=model.dense_layers)
    spans, steps = lengthened(spans, steps, tokens)
    history = History(most_spans=MOST_SPANS, most_steps=_MOST_STEPS)
    history.add_spans(spans)
    history.add_steps(steps)
    groups: dict[str, set[bool]] = {}
    for name, origin in machine.origins.items():
        groups.setdefault(name.partition(".")[0].partition("_")[0], set()).add(origin is Origin.ASSUMED)
    used = ("cpu", "gpu", "link") if memory.card is not None else ("cpu",)
    used = (*used, "disk") if memory.disk else used
    return Predicted(
        shape,
        history,
        tuple(steps["start_ns"][steps["name"] == DECODE].tolist()),
        outcome.ttft_s,
        outcome.decode_tokens_per_s,
        outcome.hit_rate if memory.slots else None,
        memory.slots,
        tuple(name for name in used if name in groups and not any(groups[name])),
        tuple(name for name in used if name not in groups or any(groups[name])),
    )


def machine_and_shape(config: EngineConfig, name: str) -> tuple[HardwareProfile, ModelShape]:
    """This machine as an engine of this configuration would find it, and the model.

    Args:
        name: of the model, for whoever finds no folder of it.

    Raises:
        EngineError: the model is not on this machine any more.
    """
    from app.services.machine_look import look_at_machine
    from engine.checkpoint.find_shape import find_shape
    from engine.hardware.profiles import EMULATED, with_emulated

    try:
        model = find_shape(config.model)
    except EngineError:
        model = find_shape(name)  # it has been moved, or the session comes from another machine
    look = look_at_machine(config.device, "" if config.device == "cpu" else config.device.partition("#")[0])
    machine = look.machine(measured_as(config.precision))
    if config.device.startswith(EMULATED) and (machine.gpu is None or look.measurements is None):
        machine = with_emulated(machine, config.device)
    return machine, model


def lengthened(spans: Records, steps: Records, tokens: int) -> tuple[Records, Records]:
    """Spans and steps of `tokens` decode steps: those that were simulated, and the last of them over and over.

    Fewer if the spans would be too many; those that were simulated beyond `tokens` are left out.
    """
    phases = np.flatnonzero(steps["name"] == DECODE)
    if not len(phases):
        return spans, steps
    first, have = int(phases[0]), len(phases)
    cycle = min(_CYCLE, have)
    per_cycle = max(int((spans["step"] >= first + have - cycle).sum()), 1)
    tokens = min(tokens, have + cycle * (max(MOST_SPANS - len(spans), 0) // per_cycle), _MOST_STEPS - first)
    if tokens <= have:
        return spans[spans["step"] < first + tokens], steps[: first + tokens]
    begin = first + have - cycle
    took_ns = int(steps["end_ns"][-1] - steps["start_ns"][begin])
    all_spans, all_steps = [spans], [steps]
    for turn in range(1, -(-(tokens - have) // cycle) + 1):
        for records, every in ((spans, all_spans), (steps, all_steps)):
            again = records[records["step"] >= begin].copy()
            again["start_ns"] += turn * took_ns
            again["end_ns"] += turn * took_ns
            again["step"] += turn * cycle
            every.append(again[again["step"] < first + tokens])
    return np.concatenate(all_spans), np.concatenate(all_steps)


def config_of(model: ModelInfo, asked: EngineConfig | None, slots: int | None) -> EngineConfig:
    """How a loaded model runs: what was asked for, and what the engine made of it.

    Args:
        slots: experts on the card, as the engine told last; None if it has no cache.
    """
    config = asked or EngineConfig(model.path)
    return replace(
        config,
        model=model.path or config.model,
        device=model.device,
        precision=model.precision if is_precision(model.precision) else AUTO,
        threads=model.threads,
        cache_slots=config.cache_slots if slots is None else slots,
    )


def config_of_session(about: Mapping[str, Any], slots: int | None) -> EngineConfig:
    """The same of what a recorded session says of itself; what it does not say is left to the engine."""
    told = about.get("config")
    known = {field.name for field in fields(EngineConfig)}
    asked = {name: value for name, value in told.items() if name in known} if isinstance(told, dict) else {}
    config = EngineConfig(**{"model": str(about.get("model", "")), **asked})
    threads = about.get("threads")
    precision = str(about.get("precision", ""))
    return replace(
        config,
        device=str(about.get("device", "cpu")),
        precision=precision if is_precision(precision) else AUTO,
        threads=threads if isinstance(threads, int) and threads > 0 else None,
        cache_slots=config.cache_slots if slots is None else slots,
    )


def request_before(history: History, at_ns: float) -> tuple[int, int] | None:
    """(tokens read, tokens decoded) of the request that decoded last before a moment; None if nothing did."""
    runs = history.last_request(at_ns)
    decoded = sum(run.tokens for run in runs if run.phase == DECODE)
    return (sum(run.tokens for run in runs if run.phase == PREFILL), decoded) if decoded else None
