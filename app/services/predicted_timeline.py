"""The simulator's prediction for a finished request, as a history to show below the real one.

Takes tens of milliseconds, or a second for the biggest models: not for the GUI thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.services.history.history import History
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.telemetry.lanes import DECODE, PREFILL

if TYPE_CHECKING:
    from engine.checkpoint.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class RequestShape:
    """A request, and how it was run."""

    config: EngineConfig
    name: str
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Predicted:
    """A prediction.

    Attributes:
        history: of one request that begins at 0 ns.
        steps_ns: beginning of every decode step, [n].
        ttft_s: time to first token.
        tokens_per_s: after it.
        hit_rate: of the experts on the card; None without a cache there.
        slots: experts on the card.
        measured, assumed: the machine's groups of numbers by their source: `cpu`, `gpu`, `link`, `disk`.
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
        EngineError: the model is no longer on this machine, or does not fit with this configuration.
    """
    from engine.hardware.machine import Origin
    from engine.planner.predict import simulate_decode
    from engine.telemetry.predicted import MOST_SPANS, MOST_STEPS, lengthened, predicted_records
    from engine.tuning.machine_state import machine_for

    config = shape.config
    model, machine = shape_of(config, shape.name), machine_for(config)
    tokens = max(shape.tokens, 2)
    outcome, memory, _ = simulate_decode(
        machine, model, config, prompt_tokens=max(shape.prompt_tokens, 1), tokens=tokens, record=True
    )
    spans, steps = predicted_records(outcome.spans, first_layer=model.dense_layers)
    spans, steps = lengthened(spans, steps, tokens)
    history = History(most_spans=MOST_SPANS, most_steps=MOST_STEPS)
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


def shape_of(config: EngineConfig, name: str) -> ModelShape:
    """The running model's shape.

    Args:
        name: of the model, in case its folder was moved, or the session comes from another machine.

    Raises:
        EngineError: the model is no longer on this machine.
    """
    from engine.checkpoint.catalogue import find_shape

    try:
        return find_shape(config.model)
    except EngineError:
        return find_shape(name)


def request_before(history: History, at_ns: float) -> tuple[int, int] | None:
    """(tokens read, tokens decoded) of the last request that decoded before a moment; None if there is none."""
    runs = history.last_request(at_ns)
    decoded = sum(run.tokens for run in runs if run.phase == DECODE)
    return (sum(run.tokens for run in runs if run.phase == PREFILL), decoded) if decoded else None
