"""Fiddler: its hit-rate bounds, the ratios of its appendix A and its three speed-ups."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.checkpoint.model_shape import read_model
from engine.hardware.machine import read_machine
from engine.planner.costs import Costs, Efficiency
from engine.planner.fiddler import hit_rate_bounds
from engine.planner.memory import card_memory, expert_slots
from engine.planner.papers import DERIVED, THROUGHPUT, PublishedCell
from engine.planner.simulator.requests import Setting, run_requests
from engine.planner.simulator.strategy import FIDDLER, ON_DEMAND, STATIC_SPLIT, WHOLE_LAYER, Strategy
from engine.planner.workload import Workload

PAPER = "Fiddler"
_MACHINES = {1: "fiddler-quadro-rtx-6000", 2: "fiddler-rtx-6000-ada"}
_SLOTS = {1: 56, 2: 125}

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


def rows(efficiency: Efficiency) -> Iterator[PublishedCell]:
    """All figures of this paper."""
    was = {1: (25.2, 18.7, 21.9), 2: (53.0, 44.6, 48.8)}
    for environment, machine in _MACHINES.items():
        costs = Costs(read_machine(machine), read_model("mixtral-8x7b"), efficiency=efficiency)
        memory = card_memory(costs.machine, costs.model, costs.precision, cached_tokens=4096)
        slots = expert_slots(memory, costs.model, costs.precision)
        cell = f"environment {environment}"
        yield PublishedCell(PAPER, "1: experts on the card", cell, "experts", DERIVED, _SLOTS[environment], slots)
        bounds = hit_rate_bounds(published_popularity(), _SLOTS[environment])
        for name, published, predicted in zip(
            ("best", "worst", "random"), was[environment], (bounds.best, bounds.worst, bounds.random), strict=True
        ):
            table = f"appendix C: {_SLOTS[environment]} of 256"
            yield PublishedCell(PAPER, table, name, "% hits", DERIVED, published, 100 * predicted)
    yield from _ratios(efficiency)
    yield from _speed_ups(efficiency)


def _ratios(efficiency: Efficiency) -> Iterator[PublishedCell]:
    ratios, activations = [], []
    for machine in _MACHINES.values():
        costs = Costs(read_machine(machine), read_model("mixtral-8x7b"), efficiency=efficiency)
        ratios.append(costs.transfer_expert() / costs.gpu_experts(1))
        activations.append(100 * costs.activations(1) / costs.cpu_experts(1))
    note = "published: an expert on the GPU at 25 to 60 GB/s, although its weights are in the GPU's own memory"
    yield PublishedCell(
        PAPER, "fig. 7: weight copy over GPU compute", "least", "x", THROUGHPUT, 2, min(ratios), note=note
    )
    yield PublishedCell(
        PAPER, "fig. 7: weight copy over GPU compute", "most", "x", THROUGHPUT, 5, max(ratios), note=note
    )
    yield PublishedCell(
        PAPER,
        "fig. 7: activation copy",
        "share of an expert on the CPU",
        "%",
        THROUGHPUT,
        1,
        max(activations),
        bound=True,
    )


def _speed_ups(efficiency: Efficiency) -> Iterator[PublishedCell]:
    def seconds(strategy: Strategy, machine: str, workload: Workload, environment: int) -> tuple[float, float]:
        costs = Costs(read_machine(machine), read_model("mixtral-8x7b"), efficiency=efficiency)
        outcome = run_requests(strategy, Setting(costs, workload, slots=_SLOTS[environment]))
        assert outcome is not None
        return outcome.seconds, outcome.ttft_s

    single, prefill, beam = [], [], []
    for environment, machine in _MACHINES.items():
        for prompt in (32, 256):
            for generated in (64, 512):
                work = Workload("single", prompt, generated)
                best = seconds(STATIC_SPLIT, machine, work, environment)[0]
                single.append(best / seconds(FIDDLER, machine, work, environment)[0])
        for prompt in (512, 1024, 2048, 4096):
            work = Workload("prefill", prompt, 1)
            ours = seconds(FIDDLER, machine, work, environment)[1]
            others = [
                seconds(other, machine, work, environment)[1]
                for other in (WHOLE_LAYER, replace(ON_DEMAND, pinned=True))
            ]
            prefill += [other / ours for other in others]
        for width in (4, 8, 12, 16):
            one = seconds(STATIC_SPLIT, machine, Workload("beam", 32, 64), environment)[0]
            ours = seconds(FIDDLER, machine, Workload("beam", 32, 64, beams=width), environment)[0]
            beam.append(width * one / ours)
    yield PublishedCell(PAPER, "fig. 4", "single batch, over llama.cpp", "x", THROUGHPUT, 1.26, statistics.mean(single))
    note = "published: 1.07 over DeepSpeed-MII, 1.65 over Mixtral-Offloading"
    yield PublishedCell(
        PAPER,
        "fig. 5",
        "long prefill, over both offloaders",
        "x",
        THROUGHPUT,
        1.30,
        statistics.geometric_mean(prefill),
        note=note,
    )
    note = "assumes that llama.cpp decodes its beams one after the other"
    yield PublishedCell(
        PAPER, "fig. 6", "beam 4-16, over llama.cpp", "x", THROUGHPUT, 11.57, statistics.mean(beam), note=note
    )
