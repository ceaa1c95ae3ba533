"""`switchyard bench decode --strategies`: the expert cache against every single strategy for misses.

Each strategy loads the model with its own configuration and decodes the same text; every repeat runs all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.bench.forced_text import ForcedText, decode_seconds, own_text, random_text
from engine.bench.opened import caches_of, opened, opened_with_cache, with_quarter_resident, without_cache
from engine.bench.report import Report, row
from engine.bench.step_costs import Choice, absent, any_of, layer_seconds, no_expert, residents, rest_seconds
from engine.bench.step_records import LayerStep, hybrid_layers, recorded_steps
from engine.bench.strategy_prediction import StepCosts, StrategyModel
from engine.experts.latency import LatencyModel

if TYPE_CHECKING:
    from engine.common.config import EngineConfig, Misses
    from engine.runtime.loaded_model import LoadedModel

_PROMPT_TOKENS = 32
_PASS_S = 10.0
"""Time limit of a run: slower strategies are timed on the beginning of the text."""

_BUFFERED_LAYERS = 2
"""A whole-layer prefetch holds the current layer and the next: a model with no more would be fully resident."""

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
        tokens: decoded in each repeat, after equally many for warm-up.
        has_own_text: whether the model generates meaningful text; otherwise a random text is used.
    """

    tokens: int
    repeats: int
    has_own_text: bool


@dataclass(slots=True)
class _Notes:
    """Intermediate results: rates of each strategy, and separate times of the parts of a step."""

    rates: dict[Misses, list[float]] = field(default_factory=dict)
    steps: list[LayerStep] = field(default_factory=list)
    parts: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    layers: int = 0
    experts: int = 0
    resident: float = 0.0

    def measure(self, name: str, loaded: LoadedModel, choose: Callable[[int], Choice], most: int) -> None:
        """Times a layer with 1 and with `most` experts that are served as `name` says."""
        for count in sorted({min(1, most), most}):
            seconds = layer_seconds(loaded, choose(count))
            if seconds is not None:
                self.parts.setdefault((name, count), []).append(seconds)

    def median(self, name: str, count: int = 0) -> float:
        """Of one part's measurements."""
        return statistics.median(self.parts[name, count])

    def line(self, name: str) -> tuple[float, float]:
        """(fixed seconds, seconds per expert), in addition to a layer without any."""
        counts = sorted(count for known, count in self.parts if known == name)
        if not counts:
            return 0.0, 0.0
        layer_s, first_s = self.median("layer"), self.median(name, counts[0])
        if len(counts) == 1:
            return 0.0, max(0.0, first_s - layer_s) / counts[0]
        each_s = max(0.0, self.median(name, counts[1]) - first_s) / (counts[1] - counts[0])
        return max(0.0, first_s - layer_s - counts[0] * each_s), each_s


def bench_strategies(config: EngineConfig, plan: StrategyPlan, report: Report, say: Callable[[str], None]) -> None:
    """Adds a row for each strategy: our speedup over it, measured and predicted by the latency model.

    Args:
        config: with the device; by default the cache has slots for 25% of the experts.

    Raises:
        EngineError: `INVALID_REQUEST` if the model has no experts to share between a device and the CPU.
    """
    config = with_quarter_resident(config)
    notes, text = _Notes(), None
    for repeat in range(plan.repeats):
        for misses in (OURS, *SINGLES):
            if misses == "layer" and notes.layers <= _BUFFERED_LAYERS:
                continue
            say(f"repeat {repeat + 1} of {plan.repeats}: {SINGLES.get(misses, 'ours')}")
            if misses == OURS:
                with opened_with_cache(config) as loaded:
                    text = text or _text(loaded, plan)
                    rate = _our_rate(loaded, text, notes)
            else:
                assert text is not None  # ours runs first
                with opened(without_cache(replace(config, misses=misses))) as loaded:
                    rate = _single_rate(loaded, text, misses, notes)
            notes.rates.setdefault(misses, []).append(rate)
    _rows(notes, config, report)


def _text(loaded: LoadedModel, plan: StrategyPlan) -> ForcedText:
    text = random_text(loaded.model.config.get_text_config().vocab_size, _PROMPT_TOKENS, plan.tokens)
    return own_text(loaded, text.prompt, plan.tokens) if plan.has_own_text else text


def _our_rate(loaded: LoadedModel, text: ForcedText, notes: _Notes) -> float:
    notes.layers, notes.experts = len(hybrid_layers(loaded.model)), loaded.info.experts
    notes.resident = sum(cache.slots for cache in caches_of(loaded)) / (notes.layers * notes.experts)
    # Two passes: the first fills the cache and lets its policy settle.
    decode_seconds(loaded, text, _PASS_S)
    with recorded_steps(loaded.model) as steps:
        seconds = decode_seconds(loaded, text, _PASS_S)
    notes.steps += steps
    notes.parts.setdefault(("rest", 0), []).append(rest_seconds(loaded, text))
    notes.measure("layer", loaded, lambda _count: no_expert, 0)
    notes.measure("hit", loaded, residents, _several(loaded))
    notes.measure("miss", loaded, absent(loaded.info.experts), _several(loaded))
    return _rate(seconds)


def _single_rate(loaded: LoadedModel, text: ForcedText, misses: Misses, notes: _Notes) -> float:
    decode_seconds(loaded, ForcedText(text.prompt, text.answer[:4]))
    seconds = decode_seconds(loaded, text, _PASS_S)
    if misses in ("cpu", "fetch"):
        notes.measure(misses, loaded, lambda count: any_of(loaded.info.experts, count), _several(loaded))
    return _rate(seconds)


def _several(loaded: LoadedModel) -> int:
    """Enough of a token's experts to separate their individual cost."""
    return max(1, loaded.info.experts_per_token // 2)


def _rate(seconds: list[float]) -> float:
    return len(seconds) / sum(seconds)


def _rows(notes: _Notes, config: EngineConfig, report: Report) -> None:
    model, ours = _model(notes), notes.rates[OURS]
    hits, needed = sum(step.hits for step in notes.steps), sum(step.needed for step in notes.steps)
    name = f"decode, {notes.resident:.0%} of the experts on {config.device}"
    predicted = {misses: 1 / model.seconds_per_token(misses, notes.steps, notes.layers) for misses in (OURS, *SINGLES)}
    report.rows.append(row(name, ours, "tokens/s", predicted=predicted[OURS]))
    for misses, peer in SINGLES.items():
        if misses not in notes.rates:
            report.skip_peer(peer, f"its buffers would hold all {notes.layers} layers of this model")
            continue
        ratio = predicted[OURS] / predicted[misses]
        report.rows.append(row(name, ours, "tokens/s", peer=peer, peer_values=notes.rates[misses], predicted=ratio))
    report.rows.append(row("hits of the expert cache", [100 * hits / max(needed, 1)], "%"))


def _model(notes: _Notes) -> StrategyModel:
    (hits_s, hit_s), (cpu_side_s, cpu_s), (fetches_s, fetch_s) = (notes.line(name) for name in ("hit", "cpu", "fetch"))
    # Fetched experts are computed while the next arrives: each adds only its transfer time.
    latency = LatencyModel("measured here", 1, cpu_s, 0.0, hit_s, 1, 0.0, 0.0, 1 / max(fetch_s, 1e-9))
    # What a miss adds here, where it is sent to the cache, over what it adds where there is none.
    post_fetch_s = max(0.0, notes.line("miss")[1] - cpu_s)
    costs = StepCosts(
        notes.median("rest"), notes.median("layer"), hits_s, cpu_side_s, max(0.0, fetches_s - hit_s), post_fetch_s
    )
    return StrategyModel(latency, costs, notes.experts)
