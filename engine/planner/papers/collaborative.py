"""CPU-GPU Collaborative: tables II, III and V, figure 5, and the ratios stated in its text.

Its table III gives times "per expert" that only agree with its tokens/s as times of a layer's two experts: 32 layers x
28.02 ms match the 1.09 tokens/s of ideal prefetching (4.8 over 4.4).  They are read that way here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine.checkpoint.model_shape import ModelShape, read_model
from engine.hardware.machine import read_machine
from engine.planner.costs import Costs
from engine.planner.papers import DERIVED, THROUGHPUT, PublishedCell
from engine.planner.papers.fiddler import REFERENCE_CODE
from engine.planner.plan_parts import Workload, card_memory, expert_slots, indexes
from engine.planner.simulator.requests import Setting, run_requests
from engine.planner.simulator.strategy import (
    COLLABORATIVE,
    CPU_ONLY,
    FINE_STATISTICS,
    IDEAL_PREFETCH,
    PUBLISHED_STATISTICS,
    RoutingSkew,
    Strategy,
)

PAPER = "CPU-GPU Collaborative"
_THREADS = (1, 2, 4, 8, 16, 24)
_TOKENS = Workload("one request", prompt_tokens=32, generated_tokens=128)
_CONTEXT = 4096
_OVER_FIDDLER = (
    "published: Fiddler, at 3.0 tokens/s, is slower than this paper's own CPU only at 24 threads (3.6 to 4.2, by its "
    "15 to 35%), though a quarter of its experts hit: that is its program, which computes experts on the CPU with the "
    "framework's operators, rather than its schedule, which is what is simulated"
)


@dataclass(frozen=True, slots=True)
class _Published:
    title: str
    expert_mib: float
    on_card_ms: float
    copied_ms: float
    on_cpu_ms: tuple[float, ...]
    best: float
    gains: tuple[float, float]
    joules: tuple[float, ...]
    joules_prefetching: float
    over_prefetching: float
    statistics: RoutingSkew


_MODELS = {
    "mixtral-8x7b": _Published(
        "Mixtral 8x7B",
        340,
        0.25,
        28.02,
        (44.12, 25.53, 18.34, 15.76, 10.96, 7.34),
        4.8,
        (1.15, 1.35),
        (177.7, 115.3, 95.8, 82.5, 55.5, 51.1),
        171.3,
        4.4,
        PUBLISHED_STATISTICS,
    ),
    "phi-3.5-moe": _Published(
        "Phi-3.5-MoE",
        152,
        0.11,
        12.26,
        (22.73, 12.80, 8.58, 6.39, 3.92, 3.36),
        10.4,
        (1.5, 3.5),
        (49.1, 33.8, 26.7, 25.9, 22.1, 21.9),
        78.7,
        4.3,
        FINE_STATISTICS,  # its section IV-D: here LRU hits far more often than chance would
    ),
}


def rows() -> Iterator[PublishedCell]:
    for name, published in _MODELS.items():
        yield from _of_model(_Model(name), published, given=name == "mixtral-8x7b")


@dataclass(frozen=True, slots=True)
class _Model:
    name: str

    @property
    def shape(self) -> ModelShape:
        return read_model(self.name)

    def costs(self, threads: int = 24) -> Costs:
        machine = read_machine("threadripper-7960x-rtx-4090")
        return Costs(machine, self.shape, threads=threads)

    @property
    def slots(self) -> int:
        costs = self.costs()
        memory = card_memory(costs.machine, self.shape, costs.precision, cached_tokens=_CONTEXT)
        return expert_slots(memory, self.shape, costs.precision)

    def decode(self, strategy: Strategy, threads: int = 24, ways: int = 0) -> float:
        """Decode steps per second."""
        statistics = _MODELS[self.name].statistics
        setting = Setting(self.costs(threads), _TOKENS, statistics=statistics, slots=self.slots, ways=ways)
        outcome = run_requests(strategy, setting)
        assert outcome is not None
        return outcome.decode_tokens_per_s

    def best(self, threads: int) -> float:
        """The best of all cache configurations, which the paper's figure 5 compares."""
        return _best_of(self, threads)

    def joules(self, threads: int, tokens_per_s: float) -> float:
        power = self.costs().machine.power
        assert power is not None
        return (power.cpu_base_w + power.cpu_per_core_w * threads + power.gpu_w) / tokens_per_s


def _counted(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


@cache
def _best_of(model: _Model, threads: int) -> float:
    experts = model.shape.experts
    tried = sorted({max(2, experts * part // 8) for part in range(2, 9)})
    return max(model.decode(COLLABORATIVE, threads, ways) for ways in tried)


def _of_model(model: _Model, published: _Published, *, given: bool) -> Iterator[PublishedCell]:
    title, costs, shape = published.title, model.costs(), model.shape
    two = shape.experts_per_token

    def row(table: str, cell: str, was: float, now: float, unit: str, **more: Any) -> PublishedCell:
        return PublishedCell(PAPER, f"{table}: {title}", cell, was, now, unit, **{"kind": THROUGHPUT} | more)

    mib = shape.expert_bytes("bf16") / 2**20
    yield row("II", "expert", published.expert_mib, mib, "MiB", kind=DERIVED)
    per_layer = "taken as the time of a layer's two experts"
    why = "published: 2.8 TB/s from a card of 1.0 TB/s; a launch was timed, not the kernel"
    computed = costs.gpu_experts(two, two) * 1e3
    yield row("III, computing", "expert on GPU", published.on_card_ms, computed, "ms", why=why)
    copied = two * costs.expert_bytes / costs.machine.link.h2d * 1e3
    yield row("III, moving", "experts moved", published.copied_ms, copied, "ms", given=given, note=per_layer)
    yield row("III, moving", "activation moved", 0.11, 2 * costs.activations(1) * 1e3, "ms", note="to and fro")
    for threads, was in zip(_THREADS, published.on_cpu_ms, strict=True):
        now, cell = model.costs(threads).cpu_experts(two, two) * 1e3, f"experts on CPU, {_counted(threads)}"
        yield row("III, computing", cell, was, now, "ms", given=given, note=per_layer)
    if shape.experts == 8:
        yield row("III-B, slots", "slots", 56, model.slots, "experts", kind=DERIVED)
        of_four = indexes(model.slots, 4, shape.layers)
        yield row("III-B, indexes", "indexes at 4 ways", 14, of_four, "indexes", kind=DERIVED)
        yield row("fig. 5", "2 ways, 24 threads", 2.2, model.decode(COLLABORATIVE, 24, 2), "tokens/s")
    best = model.best(24)
    ideal = model.decode(IDEAL_PREFETCH)
    yield row("fig. 5", "best, 24 threads", published.best, best, "tokens/s")
    gains = [model.best(threads) / model.decode(CPU_ONLY, threads) for threads in _THREADS]
    yield row("IV-B, cache over CPU only", "least", published.gains[0], min(gains), "x")
    yield row("IV-B, cache over CPU only", "most", published.gains[1], max(gains), "x")
    yield row("IV-B, over others", "over ideal prefetching", published.over_prefetching, best / ideal, "x")
    if shape.experts == 8:
        over = best / model.decode(REFERENCE_CODE)
        yield row("IV-B, over others", "over Fiddler", 1.6, over, "x", why=_OVER_FIDDLER)
    watts = "watts from its table IV"
    for threads, was in zip(_THREADS, published.joules, strict=True):
        yield row("V", _counted(threads), was, model.joules(threads, model.best(threads)), "J/token", note=watts)
    yield row("V", "prefetching", published.joules_prefetching, model.joules(1, ideal), "J/token", note=watts)
