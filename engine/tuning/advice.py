"""What would make a model that runs faster, by how its tokens waited, its cache and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.formats import FORMATS, next_smaller
from engine.hardware.machine import HardwareProfile
from engine.hardware.probe import is_busy
from engine.planner.predict import tokens_per_s_with
from engine.protocol import CacheReport
from engine.telemetry.analysis import OTHER, Waiting

SlotsAndMisses = tuple[int, float]
"""(capacity of the top tier in experts, miss rate)."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSpeed:
    """Predicts speedups of one loaded model on one machine.

    Attributes:
        config: its settings, with the actual precision, device and threads.
    """

    machine: HardwareProfile
    model: ModelShape
    config: EngineConfig

    def gain(
        self,
        now: SlotsAndMisses,
        then: SlotsAndMisses,
        *,
        precision: str | None = None,
        threads: int | None = None,
    ) -> float | None:
        """Predicted decode speed after the change over that before it; None if unknown.

        Other thread counts are predicted only if several were measured.

        Errors of the machine model that affect both speeds cancel out in the ratio.
        """
        if threads is not None and len(self.machine.cpu.weights_bytes_per_s) < 2:
            return None
        changed = replace(
            self.config, precision=precision or self.config.precision, threads=threads or self.config.threads
        )
        try:
            before = tokens_per_s_with(self.machine, self.model, self.config, *now)
            after = tokens_per_s_with(self.machine, self.model, changed, *then)
        except EngineError:  # it fits in no available precision
            return None
        return after / before


Change = Literal["other_programs", "threads", "cache_slots", "ram", "precision", "none"]

_WORTH = 1.05
"""Changes with a smaller gain are not suggested."""


@dataclass(frozen=True, slots=True)
class Running:
    """The engine's current settings.

    Attributes:
        precision: of the weights.
        threads, cores: threads that compute, and available cores.
        free_vram_bytes, free_ram_bytes: available for more experts.
    """

    precision: str
    threads: int
    cores: int
    free_vram_bytes: int = 0
    free_ram_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Advice:
    """A suggested change.

    Attributes:
        change: the kind of change; `none` if nothing would help.
        value: the new threads, slots or precision; empty for `other_programs`.
        gain: estimated speedup; 1 for `none`.
    """

    change: Change
    value: str = ""
    gain: float = 1.0


def advise(
    waiting: Waiting, report: CacheReport | None, running: Running, planned: PlannedSpeed | None = None
) -> Advice:
    """The change with the largest gain.

    If other programs use much of the CPU, that comes first: the timeline then mostly reflects them.

    The gain is the planner's, limited to what remains when the lanes concerned take no time (Amdahl). Without a plan
    the rules are: more threads speed up the CPU's lanes by the square root of their number, up to the cores; fewer
    bytes per weight speed up everything that reads or moves weights; more cache slots help by the misses that they save
    according to the miss-ratio curve.
    """
    options = [Advice("none")]
    if not waiting.tokens:
        return options[0]
    if is_busy(waiting.others):
        return Advice("other_programs")
    now = _slots_and_misses(report)
    on_cpu = waiting.share.get("cpu_experts", 0.0) + waiting.share.get("cpu_attention", 0.0)
    if running.threads < running.cores:
        # Bandwidth-bound work gains less than proportionally from threads.
        by_rule = _amdahl(on_cpu, (running.cores / max(running.threads, 1)) ** 0.5)
        predicted = planned.gain(now, now, threads=running.cores) if planned is not None else None
        options.append(Advice("threads", str(running.cores), _within(on_cpu, predicted, by_rule)))
    smaller = next_smaller(running.precision) if running.precision in FORMATS else None
    if smaller is not None:
        moved = sum(part for lane, part in waiting.share.items() if lane not in (OTHER, "small_copy"))
        shrinks = FORMATS[running.precision].bits / FORMATS[smaller].bits
        by_rule = _amdahl(moved, max(1.0, 0.85 * shrinks))
        predicted = None
        if planned is not None:
            then = _slots_and_misses(report, int(now[0] * shrinks))  # the same bytes hold more experts
            predicted = planned.gain(now, then, precision=smaller)
        options.append(Advice("precision", smaller, _within(moved, predicted, by_rule)))
    if report is not None:
        options += _more_slots(waiting, report, running, planned)
    best = max(options, key=lambda option: option.gain)
    return best if best.gain >= _WORTH else options[0]


def predicted_rate(report: CacheReport, slots: Sequence[int]) -> list[float]:
    """Tokens per second for numbers of slots in the top tier, by the miss-ratio curve; empty if unknown.

    The current step time changes by the cost of additional or saved misses; hit rates are LRU's, relative to LRU's at
    the current slots.
    """
    if not (report.tiers and report.curve_slots and report.steps_per_s > 0 and report.miss_s > report.hit_s):
        return []
    at_curve, rates = np.array(report.curve_slots, np.float64), np.array(report.curve_hit_rates)
    now = np.interp(report.tiers[0].slots, at_curve, rates)
    then = np.interp(np.asarray(slots, np.float64), at_curve, rates)
    miss_cost_s = report.lookups_per_step * (report.miss_s - report.hit_s)
    step_s = 1 / report.steps_per_s
    # A step cannot get faster than without misses.
    least_s = max(step_s - (1 - now) * miss_cost_s, 0.2 * step_s)
    return [float(1 / max(step_s - (rate - now) * miss_cost_s, least_s)) for rate in then]


def _more_slots(waiting: Waiting, report: CacheReport, running: Running, planned: PlannedSpeed | None) -> list[Advice]:
    if not report.tiers or not report.steps_per_s:
        return []
    tier = report.tiers[0]
    free = running.free_vram_bytes if tier.tier == "vram" else running.free_ram_bytes
    slots = min(tier.slots + free // max(tier.record_bytes, 1), tier.most_slots)
    if slots <= tier.slots:
        return []
    change: Change = "cache_slots" if tier.tier == "vram" else "ram"
    predicted = None
    if planned is not None and report.curve_slots:
        predicted = planned.gain(_slots_and_misses(report), _slots_and_misses(report, slots))
    rates = predicted_rate(report, [slots])
    if predicted is None:
        return [Advice(change, str(slots), rate / report.steps_per_s) for rate in rates]
    touched = 1 - waiting.share.get(OTHER, 0.0)
    return [Advice(change, str(slots), _within(touched, predicted, predicted))]


def _slots_and_misses(report: CacheReport | None, slots: int | None = None) -> SlotsAndMisses:
    """(slots, miss rate) with so many slots, by default the current ones; without a cache nothing misses.

    The current miss rate is the recent one; with other slots it changes like LRU's.
    """
    if report is None or not report.tiers:
        return 0, 0.0
    tier = report.tiers[0]
    slots = tier.slots if slots is None else min(slots, tier.most_slots)
    at, then = 1.0, 1.0
    if report.curve_slots:
        at, then = 1 - np.interp((tier.slots, slots), report.curve_slots, report.curve_hit_rates)
    missed = 1 - tier.recent_hit_rate if tier.recent_hit_rate >= 0 else at
    return slots, float(np.clip(missed * (then / at if at > 0 else 1.0), 0.0, 1.0))


def _within(share: float, predicted: float | None, by_rule: float) -> float:
    """The predicted gain, limited to that of eliminating the share of time concerned."""
    return by_rule if predicted is None else min(predicted, 1 / max(1 - share, 1e-3))


def _amdahl(share: float, faster: float) -> float:
    return 1 / (1 - share + share / faster)
