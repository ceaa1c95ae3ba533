"""Fiddler: its hit-rate bounds, the ratios of its appendix A and its three speed-ups."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from engine.checkpoint.model_shape import read_model
from engine.hardware.machine import read_machine
from engine.planner.costs import Costs
from engine.planner.papers import DERIVED, THROUGHPUT, PublishedCell
from engine.planner.plan_parts import Workload, card_memory, expert_slots
from engine.planner.simulator.request import Outcome
from engine.planner.simulator.requests import Setting, run_requests
from engine.planner.simulator.strategy import FIDDLER, ON_DEMAND, STATIC_SPLIT, WHOLE_LAYER, Strategy

PAPER = "Fiddler"
_MACHINES = {1: "fiddler-quadro-rtx-6000", 2: "fiddler-rtx-6000-ada"}
_SLOTS = {1: 56, 2: 125}
_BEAM_TOKENS = 64
REFERENCE_CODE = replace(FIDDLER, overlapped=False)
"""Its published code copies experts into one place on the card, each once the one before it has been computed."""

# Appendix C: smallest 0.22; 15 experts below 0.6; quartiles 0.67 and 0.76; 27 experts above 0.8; largest 1.
_RANKS = (15, 64, 128, 192, 229)
_POPULARITY = (0.6, 0.67, 0.715, 0.76, 0.8)


def published_popularity() -> list[float]:
    """256 popularities that match the quantiles in the paper.

    Cubic tails bring the mean (0.71) and the spread (0.08) closest to the published ones.
    """
    ranks = np.arange(256.0)
    values = np.interp(ranks, _RANKS, _POPULARITY)
    low, high = _RANKS[0], _RANKS[-1]
    values[:low] = 0.6 - (0.6 - 0.22) * ((low - ranks[:low]) / low) ** 3
    values[high:] = 0.8 + (1.0 - 0.8) * ((ranks[high:] - high) / (255 - high)) ** 3
    return [float(value) for value in values]


@dataclass(frozen=True, slots=True)
class HitRateBounds:
    """Hit rates of static placements of equal size: the most popular experts, the least popular, random ones."""

    best: float
    worst: float
    random: float


def hit_rate_bounds(popularity: Sequence[float], slots: int) -> HitRateBounds:
    """Bounds of a static placement of `slots` experts (appendix C)."""
    ranked = sorted(popularity)
    total = sum(ranked)
    slots = min(slots, len(ranked))
    return HitRateBounds(
        best=sum(ranked[len(ranked) - slots :]) / total,
        worst=sum(ranked[:slots]) / total,
        random=slots / len(ranked),
    )


def rows() -> Iterator[PublishedCell]:
    was = {1: (25.2, 18.7, 21.9), 2: (53.0, 44.6, 48.8)}
    for environment, machine in _MACHINES.items():
        costs = Costs(read_machine(machine), read_model("mixtral-8x7b"))
        memory = card_memory(costs.machine, costs.model, costs.precision, cached_tokens=4096)
        slots = expert_slots(memory, costs.model, costs.precision)
        cell = f"environment {environment}"
        yield PublishedCell(PAPER, "1: experts on the card", cell, _SLOTS[environment], slots, "experts", DERIVED)
        bounds = hit_rate_bounds(published_popularity(), _SLOTS[environment])
        for name, published, predicted in zip(
            ("best", "worst", "random"), was[environment], (bounds.best, bounds.worst, bounds.random), strict=True
        ):
            table = f"appendix C: {_SLOTS[environment]} of 256"
            yield PublishedCell(PAPER, table, name, published, 100 * predicted, "% hits", DERIVED)
    yield from _ratios()
    yield from _speed_ups()


def _ratios() -> Iterator[PublishedCell]:
    ratios, activations = [], []
    for machine in _MACHINES.values():
        costs = Costs(read_machine(machine), read_model("mixtral-8x7b"))
        ratios.append(costs.transfer_expert() / costs.gpu_experts(1))
        activations.append(100 * costs.d2h(2.0 * costs.model.hidden) / costs.cpu_experts(1))
    why = (
        "published: 3 to 14 ms for an expert on the GPU, 25 to 125 GB/s out of a memory of 672 and 960 GB/s: a call of "
        "the framework was timed, once in each layer, and the card reads the weights in a fraction of that"
    )
    row = partial(PublishedCell, PAPER, kind=THROUGHPUT)
    yield row("fig. 7: weight copy over GPU compute", "least", 2, min(ratios), unit="x", why=why)
    yield row("fig. 7: weight copy over GPU compute", "most", 5, max(ratios), unit="x", why=why)
    share = "share of an expert on the CPU"
    yield row("fig. 7: activation copy", share, 1, max(activations), unit="%", bound=True)


def _speed_ups() -> Iterator[PublishedCell]:
    single, whole_layer, on_demand, beam = [], [], [], []
    for environment, machine in _MACHINES.items():
        costs = Costs(read_machine(machine), read_model("mixtral-8x7b"))
        run = partial(_run, costs, _SLOTS[environment])
        for prompt in (32, 256):
            for generated in (64, 512):
                work = Workload("single", prompt, generated)
                single.append(run(STATIC_SPLIT, work).seconds / run(REFERENCE_CODE, work).seconds)
        for prompt in (512, 1024, 2048, 4096):
            work = Workload("prefill", prompt, 1)
            ours = run(REFERENCE_CODE, work).ttft_s
            whole_layer.append(run(WHOLE_LAYER, work).ttft_s / ours)
            on_demand.append(run(replace(ON_DEMAND, pinned=True), work).ttft_s / ours)
        for width in (4, 8, 12, 16):
            ours = run(REFERENCE_CODE, Workload("beam", 32, _BEAM_TOKENS, beams=width)).seconds
            beam.append(_llama_cpp_beams(run, width) / ours)

    row, mean = partial(PublishedCell, PAPER, "speed-ups", unit="x", kind=THROUGHPUT), statistics.mean
    yield row("single batch, over llama.cpp", 1.26, mean(single))
    yield row("long prefill, over DeepSpeed-MII", 1.07, mean(whole_layer))
    yield row("long prefill, over Mixtral-Offloading", 1.65, mean(on_demand))
    note = (
        "llama.cpp's beams at that time: each decodes alone, with every token since the beams parted, in every step; "
        "they part 2 (width - 1) tokens back, as parents drawn with equal chances do"
    )
    yield row("beam 4-16, over llama.cpp", 11.57, mean(beam), note=note)


def _run(costs: Costs, slots: int, strategy: Strategy, workload: Workload) -> Outcome:
    outcome = run_requests(strategy, Setting(costs, workload, slots=slots))
    assert outcome is not None
    return outcome


def _llama_cpp_beams(run: Callable[[Strategy, Workload], Outcome], width: int) -> float:
    """Seconds of its beam search: beams share one sequence of keys and values, which ends where they part."""
    parted = 2 * (width - 1)
    known = sorted({1, *(min(2**power, parted) for power in range(1, 6))})
    outcomes = [run(STATIC_SPLIT, Workload("beam", 32, _BEAM_TOKENS, beams=rows)) for rows in known]
    behind = np.minimum(np.arange(1, _BEAM_TOKENS), parted)
    steps = width * np.interp(behind, known, [outcome.tpot_s for outcome in outcomes])
    # What all have in common is decoded once more, to stay.
    settled = outcomes[0].tpot_s * max(0, _BEAM_TOKENS - 1 - parted)
    return float(outcomes[0].ttft_s + steps.sum() + settled)
