"""The one change that would help most, by rules, with what it is thought to gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.telemetry.analysis import OTHER, Waiting
from engine.telemetry.messages import CacheReport

Change = Literal["threads", "cache_slots", "ram", "precision", "none"]

_WORTH = 1.05
"""A change that gains less is not worth a word."""
_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.06, "int4": 0.56}
"""Of a weight, with its scales."""
_NEXT = {"fp32": "bf16", "bf16": "int8", "int8": "int4"}


@dataclass(frozen=True, slots=True)
class Running:
    """How the engine runs now.

    Attributes:
        precision: of the weights.
        threads, cores: that compute, and that there are.
        free_vram_bytes, free_ram_bytes: that more experts could have.
    """

    precision: str
    threads: int
    cores: int
    free_vram_bytes: int = 0
    free_ram_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Advice:
    """A change.

    Attributes:
        change: what; `none` if nothing is thought to gain.
        value: to which: threads, slots, or a precision.
        gain: how many times as fast, as it is thought; 1 for `none`.
    """

    change: Change
    value: str = ""
    gain: float = 1.0


def advise(waiting: Waiting, report: CacheReport | None, running: Running) -> Advice:
    """The change that gains most.

    By Amdahl's law: the share of time that a change touches, and how much faster that part gets.  More threads help
    the CPU's lanes as far as there are cores; fewer bytes a weight help whatever reads or moves weights; more places
    in the cache help by the misses that the miss-ratio curve says they save.
    """
    options = [Advice("none")]
    if not waiting.tokens:
        return options[0]
    on_cpu = waiting.share.get("cpu_experts", 0.0) + waiting.share.get("cpu_attention", 0.0)
    if running.threads < running.cores:
        # What is bound by the memory's bandwidth gains less than in proportion to the threads.
        faster = (running.cores / max(running.threads, 1)) ** 0.5
        options.append(Advice("threads", str(running.cores), _amdahl(on_cpu, faster)))
    smaller = _NEXT.get(running.precision)
    if smaller is not None:
        moved = sum(part for lane, part in waiting.share.items() if lane not in (OTHER, "small_copy"))
        faster = 0.85 * _BYTES[running.precision] / _BYTES[smaller]
        options.append(Advice("precision", smaller, _amdahl(moved, max(1.0, faster))))
    if report is not None:
        options += _more_slots(report, running)
    best = max(options, key=lambda option: option.gain)
    return best if best.gain >= _WORTH else options[0]


def predicted_rate(report: CacheReport, slots: Sequence[int]) -> list[float]:
    """Tokens per second with so many slots in the topmost tier, by the miss-ratio curve; empty if that is not known.

    What a step takes now changes by what each miss more or less costs; hit rates are LRU's, taken relative to what
    LRU would hit with the slots that there are.
    """
    if not (report.tiers and report.curve_slots and report.steps_per_s > 0 and report.miss_s > report.hit_s):
        return []
    at_curve, rates = np.array(report.curve_slots, np.float64), np.array(report.curve_hit_rates)
    now = np.interp(report.tiers[0].slots, at_curve, rates)
    then = np.interp(np.asarray(slots, np.float64), at_curve, rates)
    miss_cost_s = report.lookups_per_step * (report.miss_s - report.hit_s)
    step_s = 1 / report.steps_per_s
    # Whatever the cache does, a step does not get faster than with no miss at all.
    least_s = max(step_s - (1 - now) * miss_cost_s, 0.2 * step_s)
    return [float(1 / max(step_s - (rate - now) * miss_cost_s, least_s)) for rate in then]


def _more_slots(report: CacheReport, running: Running) -> list[Advice]:
    if not report.tiers or not report.steps_per_s:
        return []
    tier = report.tiers[0]
    free = running.free_vram_bytes if tier.tier == "vram" else running.free_ram_bytes
    slots = min(tier.slots + free // max(tier.record_bytes, 1), tier.most_slots)
    rates = predicted_rate(report, [slots]) if slots > tier.slots else []
    change: Change = "cache_slots" if tier.tier == "vram" else "ram"
    return [Advice(change, str(slots), rate / report.steps_per_s) for rate in rates]


def _amdahl(share: float, faster: float) -> float:
    return 1 / (1 - share + share / faster)
