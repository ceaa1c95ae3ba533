"""`switchyard bench decode --strategies`: the expert cache against every single way of meeting a miss.

Each strategy is the model loaded with its own configuration, decoding the same text; in every repeat all have a turn.

Beside it stands what each way should take by the latency model, for the very routing of a measured run. A layer's
experts are computed on two sides that work at once: the device (hits, then what was fetched, as it arrives) and the
CPU. The later of the two ends the layer. Nothing is fitted to the times of the run: the constants are measured apart
from it, the routing and the hits are those of the run.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.peers.beside import ON_CPU, reading_peers
from benchmarks.peers.library import LIBRARY
from benchmarks.shared_experts import (
    LayerStep,
    opened_with_cache,
    recorded_steps,
    replaced_kernels,
    with_quarter_resident,
    without_cache,
)
from engine.bench.decode import PrefillPlan, bench_prefill, read_rate
from engine.bench.opened import ForcedText, caches_of, decode_seconds, hybrid_layers, opened, own_text, random_text
from engine.bench.report import PeerError, Report, in_turn
from engine.common import clock
from engine.common.config import Misses
from engine.experts.latency import LatencyModel
from engine.experts.shares import Estimate, split_among

if TYPE_CHECKING:
    from engine.common.config import EngineConfig
    from engine.experts.dispatcher import HybridExperts
    from engine.runtime.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured constants of one model on one device, in seconds.

    Attributes:
        rest_s: a decode step without its expert layers.
        layer_s: an expert layer without experts: copying the routing to the CPU, and the sum.
        hits_s, cpu_side_s, fetches_s: fixed cost of having any hits, CPU experts or fetched experts, in addition to the
            cost of each.
        post_fetch_s: extra cost of an expert on the CPU for sending it to the cache.
    """

    rest_s: float
    layer_s: float
    hits_s: float
    cpu_side_s: float
    fetches_s: float
    post_fetch_s: float


@dataclass(frozen=True, slots=True)
class StrategyModel:
    """Predicts seconds per token.

    Attributes:
        latency: of one expert, not corrected by the predicted run.
        experts: of each layer.
    """

    latency: LatencyModel
    costs: StepCosts
    experts: int

    def seconds_per_token(self, misses: Misses, steps: Iterable[LayerStep], layers: int) -> float:
        """Mean over the recorded steps.

        Args:
            misses: the strategy; the recorded hits count for `mixed` only, the others have no cache.
            layers: expert layers of one token.
        """
        layer_s = {"mixed": self._mixed, "cpu": self._cpu, "fetch": self._fetch, "off": self._off, "layer": self._layer}
        spans = [layer_s[misses](step) for step in steps]
        return self.costs.rest_s + layers * sum(spans) / max(len(spans), 1)

    def _mixed(self, step: LayerStep) -> float:
        return self._two_sides(step.hits, step.on_cpu, step.fetched, step.backlog, self.costs.post_fetch_s)

    def _cpu(self, step: LayerStep) -> float:
        return self._two_sides(0, step.needed, 0, 0)

    def _fetch(self, step: LayerStep) -> float:
        return self._two_sides(0, 0, step.needed, 0)

    def _off(self, step: LayerStep) -> float:
        latency = self.latency
        ways = [Estimate(latency.cpu_s, keeps_caller=True), Estimate(latency.gpu_s, latency.transfer_s)]
        on_cpu, fetched = split_among([(expert, 1) for expert in range(step.needed)], ways)
        return self._two_sides(0, len(on_cpu), len(fetched), 0)

    def _layer(self, step: LayerStep) -> float:
        """All experts of the next layer arrive while this one is computed."""
        return max(self._two_sides(step.needed, 0, 0, 0), self.experts * self.latency.transfer_s)

    def _two_sides(self, hits: int, on_cpu: int, fetched: int, backlog: int, later_s: float = 0.0) -> float:
        latency, costs = self.latency, self.costs
        device_s = costs.hits_s + hits * latency.gpu_s(1) if hits else 0.0
        arrived_s = backlog * latency.transfer_s
        for _ in range(fetched):
            arrived_s += latency.transfer_s
            device_s = max(device_s, arrived_s) + latency.gpu_s(1)
        device_s += costs.fetches_s if fetched else 0.0
        cpu_s = costs.cpu_side_s + on_cpu * (latency.cpu_s(1) + later_s) if on_cpu else 0.0
        return costs.layer_s + max(device_s, cpu_s)


_CALLS = 40
_MOST_S = 3.0

Choice = Callable[[int, "HybridExperts"], Sequence[int] | None]
"""(layer number in its cache, its experts) -> experts to request, or None to skip the layer."""


def rest_seconds(loaded: LoadedModel, text: ForcedText) -> float:
    """Mean seconds of a decode step without its expert layers."""
    with replaced_kernels(loaded.model, lambda _experts: lambda hidden, _index, _weights: torch.zeros_like(hidden)):
        return statistics.fmean(decode_seconds(loaded, text, at_most_s=_MOST_S)[1:])


def layer_seconds(loaded: LoadedModel, choose: Choice) -> float | None:
    """Mean seconds of a single-token expert layer with the experts of `choose`; None if it skips all layers."""
    layers = _numbered([experts for _, experts in hybrid_layers(loaded.model)])
    width, top_k = loaded.model.config.get_text_config().hidden_size, loaded.info.experts_per_token
    dtype = next(loaded.model.parameters()).dtype
    hidden = torch.randn(1, width, dtype=dtype, device=loaded.device)
    weights = torch.full((1, top_k), 1 / top_k, device=loaded.device)
    spans: list[float] = []
    until_s = clock.now() + _MOST_S
    with torch.inference_mode(), loaded.token_by_token():
        for number, experts in itertools.islice(itertools.cycle(layers), 4 * _CALLS):
            chosen = choose(number, experts)
            if chosen is None:
                continue
            # Invalid ids are skipped, so fewer experts can be requested than a token uses.
            ids = [*chosen, *[loaded.info.experts] * (top_k - len(chosen))]
            index = torch.tensor([ids], device=loaded.device)
            begun_s = clock.now()
            experts(hidden, index, weights)
            spans.append(clock.now() - begun_s)
            if len(spans) >= _CALLS or clock.now() > until_s:
                break
    return statistics.fmean(spans[len(spans) // 10 :]) if spans else None


def no_expert(_number: int, _experts: HybridExperts) -> Sequence[int]:
    """Requests none: what remains is copying the routing to the CPU, and the sum."""
    return []


def residents(count: int) -> Choice:
    """Asks for so many that are on the device now."""

    def choose(number: int, experts: HybridExperts) -> Sequence[int] | None:
        there = sorted(experts.cache.residents(number))
        return random.sample(there, count) if len(there) >= count else None

    return choose


def absent(total: int) -> Callable[[int], Choice]:
    """Asks for so many of `total` that are not on the device now."""

    def choice(count: int) -> Choice:
        def choose(number: int, experts: HybridExperts) -> Sequence[int] | None:
            missing = sorted(set(range(total)) - experts.cache.residents(number).keys())
            return random.sample(missing, count) if len(missing) >= count else None

        return choose

    return choice


def any_of(total: int, count: int) -> Choice:
    """Asks for so many of `total`, wherever they are."""
    return lambda _number, _experts: random.sample(range(total), count)


def _numbered(layers: Sequence[HybridExperts]) -> list[tuple[int, HybridExperts]]:
    """Layers of one cache are numbered in the order of the model."""
    counters: dict[int, itertools.count[int]] = {}
    return [(next(counters.setdefault(id(experts.cache), itertools.count())), experts) for experts in layers]


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
    """Intermediate results: separate times of the parts of a step."""

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
    """
    config = with_quarter_resident(config)
    notes, texts = _Notes(), list[ForcedText]()

    def ours(_repeat: int) -> float:
        with opened_with_cache(config) as loaded:
            texts[:] = texts or [_text(loaded, plan)]
            return _our_rate(loaded, texts[0], notes)

    def single(misses: Misses, _repeat: int) -> float:
        if misses == "layer" and notes.layers <= _BUFFERED_LAYERS:
            raise PeerError(f"its buffers would hold all {notes.layers} layers of this model")
        with opened(without_cache(replace(config, misses=misses))) as loaded:
            return _single_rate(loaded, texts[0], misses, notes)

    turns: dict[str, Callable[[int], float]] = {"ours": ours}
    turns |= {name: partial(single, misses) for misses, name in SINGLES.items()}
    _rows(notes, in_turn(turns, plan.repeats, report, say, warm_ups=0), config, report)


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


def _rows(notes: _Notes, rates: dict[str, list[float]], config: EngineConfig, report: Report) -> None:
    model, ours = _model(notes), rates["ours"]
    hits, needed = sum(step.hits for step in notes.steps), sum(step.needed for step in notes.steps)
    name = f"decode, {notes.resident:.0%} of the experts on {config.device}"
    predicted = {misses: 1 / model.seconds_per_token(misses, notes.steps, notes.layers) for misses in (OURS, *SINGLES)}
    report.add(name, ours, "tokens/s", predicted=predicted[OURS])
    for misses, peer in SINGLES.items():
        if peer in rates:
            ratio = predicted[OURS] / predicted[misses]
            report.add(name, ours, "tokens/s", peer=peer, peer_values=rates[peer], predicted=ratio)
    report.add("hits of the expert cache", [100 * hits / max(needed, 1)], "%")


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


_SINGLES: dict[Misses, str] = {"fetch": "on-demand fetch", "cpu": "all experts on the CPU"}


def bench_prefill_beside(
    config: EngineConfig,
    plan: PrefillPlan,
    peers: Sequence[str],
    report: Report,
    say: Callable[[str], None],
    *,
    strategies: bool,
) -> None:
    """Adds the rows of `bench_prefill`, and ours against each peer.

    Args:
        strategies: also run the single ways to serve misses; then the device keeps 25% of the experts unless the
            configuration says otherwise.
    """
    if strategies:
        config = with_quarter_resident(config)
    else:
        report.skip_peer("on-demand fetch, all experts on the CPU", "asked for with --strategies")
    if LIBRARY not in peers:
        report.skip_peer(ON_CPU, "asked for with --peers")

    def single(misses: Misses, _repeat: int) -> float:
        with opened(without_cache(replace(config, misses=misses))) as loaded:
            return read_rate(loaded, plan.prompt_tokens)

    def beside(precision: str, prompt: Sequence[int]) -> dict[str, Callable[[int], float]]:
        singles = {name: partial(single, misses) for misses, name in _SINGLES.items()} if strategies else {}
        return {**singles, **reading_peers(config, precision, prompt, report, say, peers)}

    rates = bench_prefill(config, plan, report, say, beside, opened_with_cache if strategies else opened)
    if strategies:
        better = [max(pair) for pair in zip(*(rates[single] for single in _SINGLES.values()), strict=True)]
        first = report.rows[0]
        report.add(first.name, rates["ours"], first.unit, peer="the better of these two", peer_values=better)
