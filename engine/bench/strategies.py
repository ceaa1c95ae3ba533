"""`switchyard bench decode --strategies`: the expert cache against every single way of meeting a miss.

Each strategy is the model loaded with its own configuration, decoding the same text; in every repeat all have a turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.bench.forced_text import ForcedText, decode_seconds, own_text, random_text
from engine.bench.opened import caches_of, opened, opened_with_cache, with_quarter_resident, without_cache
from engine.bench.report import Report, row
from engine.bench.step_costs import layer_seconds, no_expert, one_of, residents, rest_seconds
from engine.bench.step_records import LayerStep, hybrid_layers, recorded_steps
from engine.bench.strategy_prediction import StepCosts, StrategyModel

if TYPE_CHECKING:
    from engine.config import EngineConfig, Misses
    from engine.experts.latency import LatencyModel
    from engine.runtime.loaded_model import LoadedModel

_PROMPT_TOKENS = 32
_PASS_S = 20.0
"""A strategy that is too slow for the whole text in this time is timed on its beginning."""

OURS: Misses = "mixed"
SINGLES: dict[Misses, str] = {
    "fetch": "on-demand fetch",
    "cpu": "all experts on the CPU",
    "layer": "whole-layer prefetch",
    "off": "the cache off",
}


@dataclass(frozen=True, slots=True)
class StrategyPlan:
    """What to run.

    Attributes:
        tokens: decoded in each repeat, after as many to warm up.
        has_own_text: whether the model knows how to write; else its text is drawn at random.
    """

    tokens: int
    repeats: int
    has_own_text: bool


@dataclass(slots=True)
class _Notes:
    """What is found out on the way: rates of each strategy, and the parts of our steps by themselves."""

    rates: dict[Misses, list[float]] = field(default_factory=dict)
    steps: list[LayerStep] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    latency: LatencyModel | None = None
    layers: int = 0
    experts: int = 0
    resident: float = 0.0
    several: int = 2

    def part(self, name: str, seconds: float | None) -> None:
        """One more measurement of a part; None if there was nothing to measure."""
        if seconds is not None:
            self.parts.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        """0 for what could not be measured."""
        return statistics.median(self.parts[name]) if name in self.parts else 0.0


def bench_strategies(config: EngineConfig, plan: StrategyPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds a row for each strategy: ours over it, as measured and as the latency model predicts.

    Args:
        config: with the device; unless it says how many slots the cache has, 25% of the experts have one.

    Raises:
        EngineError: `INVALID_REQUEST` if the model has no experts that a device and the CPU could share.
    """
    config = with_quarter_resident(config)
    notes, text = _Notes(), None
    for repeat in range(plan.repeats):
        for misses in (OURS, *SINGLES):
            say(f"repeat {repeat + 1} of {plan.repeats}: {SINGLES.get(misses, 'ours')}")
            if misses == OURS:
                with opened_with_cache(config) as loaded:
                    text = text or _text(loaded, plan)
                    rate = _our_rate(loaded, text, notes)
            else:
                assert text is not None  # ours came first
                with opened(without_cache(replace(config, misses=misses))) as loaded:
                    rate = _single_rate(loaded, text, misses, notes)
            notes.rates.setdefault(misses, []).append(rate)
    _rows(notes, config, report)


def _text(loaded: LoadedModel, plan: StrategyPlan) -> ForcedText:
    text = random_text(loaded.model.config.get_text_config().vocab_size, _PROMPT_TOKENS, plan.tokens)
    return own_text(loaded, text.prompt, plan.tokens) if plan.has_own_text else text


def _our_rate(loaded: LoadedModel, text: ForcedText, notes: _Notes) -> float:
    layers = hybrid_layers(loaded.model)
    notes.layers, notes.experts = len(layers), loaded.info.experts
    notes.resident = sum(cache.slots for cache in caches_of(loaded)) / (notes.layers * notes.experts)
    # Twice over: the first pass fills the cache, and its policy settles.
    decode_seconds(loaded, text, _PASS_S)
    with recorded_steps(loaded.model) as steps:
        seconds = decode_seconds(loaded, text, _PASS_S)
    notes.steps += steps
    notes.part("rest", rest_seconds(loaded, text))
    notes.part("layer", layer_seconds(loaded, no_expert))
    notes.part("one hit", layer_seconds(loaded, residents(1)))
    notes.several = max(2, loaded.info.experts_per_token // 2)
    notes.part("several hits", layer_seconds(loaded, residents(notes.several)))
    # Without the corrections that this very run made: those would know the result.
    notes.latency = notes.latency or replace(layers[0][1].latency)
    return _rate(seconds)


def _single_rate(loaded: LoadedModel, text: ForcedText, misses: Misses, notes: _Notes) -> float:
    decode_seconds(loaded, ForcedText(text.prompt, text.answer[:4]))
    seconds = decode_seconds(loaded, text, _PASS_S)
    if misses in ("cpu", "fetch"):
        notes.part(misses, layer_seconds(loaded, one_of(loaded.info.experts)))
    return _rate(seconds)


def _rate(seconds: list[float]) -> float:
    return len(seconds) / sum(seconds)


def _rows(notes: _Notes, config: EngineConfig, report: Report) -> None:
    model, ours = _model(notes), notes.rates[OURS]
    hits, needed = sum(step.hits for step in notes.steps), sum(step.needed for step in notes.steps)
    name = f"decode, {notes.resident:.0%} of the experts on {config.device}"
    predicted = {misses: 1 / model.seconds_per_token(misses, notes.steps, notes.layers) for misses in (OURS, *SINGLES)}
    report.rows.append(row(name, ours, "tokens/s", predicted=predicted[OURS]))
    for misses, peer in SINGLES.items():
        ratio = predicted[OURS] / predicted[misses]
        report.rows.append(row(name, ours, "tokens/s", peer=peer, peer_values=notes.rates[misses], predicted=ratio))
    report.rows.append(row("hits of the expert cache", [100 * hits / max(needed, 1)], "%"))


def _model(notes: _Notes) -> StrategyModel:
    latency = notes.latency
    assert latency is not None
    layer_s, one_s = notes.median("layer"), notes.median("one hit")
    each_s = (notes.median("several hits") - one_s) / (notes.several - 1) - latency.gpu_s(1)
    costs = StepCosts(
        rest_s=notes.median("rest"),
        layer_s=layer_s,
        hits_s=max(0.0, one_s - layer_s - latency.gpu_s(1) - max(0.0, each_s)),
        hit_s=max(0.0, each_s),
        cpu_side_s=max(0.0, notes.median("cpu") - layer_s - latency.cpu_s(1)),
        fetch_s=max(0.0, notes.median("fetch") - layer_s - latency.transfer_s - latency.gpu_s(1)),
    )
    return StrategyModel(latency, costs, notes.experts)
