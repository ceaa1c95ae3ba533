"""What the simulator predicts for a request that has run, as a past that can be shown beneath the real one.

Slow enough (tens of milliseconds, a second for the biggest models) to be asked for off the thread of a window.
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
    from engine.telemetry.predicted import MOST_SPANS, MOST_STEPS, lengthened, predicted_records
    from engine.tuning.machine_look import machine_for

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
    """The model that runs.

    Args:
        name: of the model, for whoever finds no folder of it: it was moved, or the session comes from another machine.

    Raises:
        EngineError: the model is not on this machine any more.
    """
    from engine.checkpoint.find_shape import find_shape

    try:
        return find_shape(config.model)
    except EngineError:
        return find_shape(name)


def request_before(history: History, at_ns: float) -> tuple[int, int] | None:
    """(tokens read, tokens decoded) of the request that decoded last before a moment; None if nothing did."""
    runs = history.last_request(at_ns)
    decoded = sum(run.tokens for run in runs if run.phase == DECODE)
    return (sum(run.tokens for run in runs if run.phase == PREFILL), decoded) if decoded else None
