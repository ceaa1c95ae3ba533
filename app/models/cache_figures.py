"""What the Monitor's cards show of caches and of a token, in figures."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from app.services.history.history import EXPERT_KINDS, History, experts_met, of_last_kind
from engine.protocol import CacheReport, MemoryPart, PolicyRate, TierReport
from engine.telemetry.analysis import joules_per_token
from engine.telemetry.lanes import BATCH_STEP, DECODE
from engine.tuning.advice import predicted_rate

LAST_STEPS = 200


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Means per token.

    Attributes:
        tokens: how many were averaged; steps: how many steps decoded them.
        is_batch: whether these were batch steps, whose tokens include those of prompts.
        experts: how they were served -> experts, see `EXPERT_KINDS`.
        took_s: seconds.
        h2d_bytes, disk_bytes: bytes copied to devices, read from disk.
        joules: None where neither cards nor processors report their power.
    """

    tokens: int
    steps: int
    is_batch: bool
    experts: dict[str, float]
    took_s: float
    h2d_bytes: float
    disk_bytes: float
    joules: float | None

    @property
    def used(self) -> float:
        return sum(self.experts.values())


def token_figures(history: History, until_ns: int | None = None) -> TokenFigures | None:
    """Means over the last steps that began before a moment; None if nothing has been decoded.

    A chat's steps or a batch's, whichever ran last: a mean of both would describe neither.
    """
    steps = history.last_steps(LAST_STEPS) if until_ns is None else history.steps_between(0, until_ns)[-LAST_STEPS:]
    steps = of_last_kind(steps)
    tokens = int(steps["tokens"].sum())
    if not tokens:
        return None
    as_decoded = steps.copy()
    as_decoded["name"] = DECODE  # batch steps use energy for their tokens too
    return TokenFigures(
        tokens,
        len(steps),
        bool((steps["name"] == BATCH_STEP).any()),
        {kind: max(0.0, float(experts_met(steps, kind).sum()) / tokens) for kind in EXPERT_KINDS},
        max(0.0, float((steps["end_ns"] - steps["start_ns"]).sum()) / 1e9 / tokens),
        max(0.0, float(steps["h2d_bytes"].sum()) / tokens),
        max(0.0, float(steps["disk_bytes"].sum()) / tokens),
        joules_per_token(*history.power(), as_decoded),
    )


MOST_TIERS = 2
MOST_POLICIES = 12
MOST_PREDICTORS = 8
MOST_PLACES = 9
"""RAM and eight cards."""
TOTAL, FREE = "total", "free"
_MOST_COUNT = 2**50


@dataclass(frozen=True, eq=False)
class CacheForecast:
    """How another size of the topmost tier would perform, from the miss-ratio curve.

    Attributes:
        slots: sizes, rising, [n].
        lru_rates: hit rates of an LRU cache on the recent routing, [n].
        hit_rates: expected of the active policy, scaled to its measured hit rate, [n].
        tokens_per_s: predicted, [n]; empty if unknown.
        gains_nothing: a miss costs no more than a hit, so that no size is faster than another.
    """

    slots: NDArray[np.float64]
    lru_rates: NDArray[np.float64]
    hit_rates: NDArray[np.float64]
    tokens_per_s: NDArray[np.float64]
    gains_nothing: bool = False

    def hit_rate_at(self, slots: float) -> float | None:
        return float(np.interp(slots, self.slots, self.hit_rates)) if len(self.slots) else None

    def tokens_per_s_at(self, slots: float) -> float | None:
        return float(np.interp(slots, self.slots, self.tokens_per_s)) if len(self.tokens_per_s) else None


NO_FORECAST = CacheForecast(np.empty(0), np.empty(0), np.empty(0), np.empty(0))


def sound(report: CacheReport) -> CacheReport:
    """The report with every number clamped to its valid range; an inconsistent curve is left out."""
    slots, rates = _sound_curve(report)
    return replace(
        report,
        tiers=tuple(_sound_tier(tier) for tier in report.tiers[:MOST_TIERS]),
        curve_slots=slots,
        curve_hit_rates=rates,
        steps_per_s=_amount(report.steps_per_s),
        lookups_per_step=_amount(report.lookups_per_step),
        hit_s=_amount(report.hit_s),
        miss_s=_amount(report.miss_s),
        predictors=tuple(
            replace(
                each,
                hit_rate=_share(each.hit_rate),
                precision=_share(each.precision),
                cost_s=_amount(each.cost_s),
                gain_s=each.gain_s if math.isfinite(each.gain_s) else 0.0,
            )
            for each in report.predictors[:MOST_PREDICTORS]
        ),
        memory=tuple(replace(part, nbytes=_count(part.nbytes)) for part in report.memory),
    )


def forecast(report: CacheReport, place: int = 0) -> CacheForecast:
    """For one tier of a sanitised report, the topmost by default; `NO_FORECAST` while there is too little data.

    A lower tier gets the misses of the one above: of two LRU caches the bigger one holds everything the smaller
    one does, so that one curve serves both (Mattson et al. 1970).
    """
    if not report.curve_slots or not 0 <= place < len(report.tiers):
        return NO_FORECAST
    tier = report.tiers[place]
    sizes = np.array(report.curve_slots, np.float64)
    # More sizes than the curve has points: the prediction is not linear between two of them.
    every = np.unique(np.concatenate((sizes, np.linspace(0, tier.most_slots, 97), [tier.slots])))
    every = every[every <= tier.most_slots]
    lru = np.interp(every, sizes, np.array(report.curve_hit_rates))
    costs = report
    if place:
        above = report.tiers[place - 1]
        there = float(np.interp(above.slots, sizes, np.array(report.curve_hit_rates)))
        lru = np.clip((lru - there) / (1 - there), 0, 1) if there < 1 else np.ones_like(lru)
        asked = report.lookups_per_step * (1 - (_measured(above) or 0.0))
        costs = replace(report, tiers=(tier,), lookups_per_step=asked, hit_s=0.0, miss_s=tier.miss_s)
    measured = _measured(tier)
    expected = lru if measured is None else _expected(tier, every, lru, measured)
    of_policy = replace(costs, curve_slots=tuple(every.tolist()), curve_hit_rates=tuple(expected.tolist()))
    nothing = 0 < costs.miss_s <= costs.hit_s
    return CacheForecast(every, lru, expected, np.array(predicted_rate(of_policy, every.tolist())), nothing)


def _measured(tier: TierReport) -> float | None:
    """The recent hit rate, else the total; None if nothing was looked up."""
    return tier.recent_hit_rate if tier.recent_hit_rate >= 0 else hit_rate(tier)


def _expected(
    tier: TierReport, slots: NDArray[np.float64], lru: NDArray[np.float64], measured: float
) -> NDArray[np.float64]:
    """LRU's curve, scaled to the measured rate: misses in proportion above the present size, hits below it.

    The best policy does at least as well as one that keeps the most popular experts, whose curve lies above its
    chords: from nothing to the present size, and from there to all experts.
    """
    at = float(np.interp(tier.slots, slots, lru))
    above = 1 - (1 - measured) * (1 - lru) / (1 - at) if at < 1 else np.maximum(measured, lru)
    below = measured * (np.minimum(lru, at) / at) if at > 0 else np.zeros_like(lru)
    expected = np.where(slots >= tier.slots, above, below)
    if tier.is_adaptive or tier.policy == "static":
        ends, hits = [0, tier.slots, tier.most_slots], [0.0, measured, 1.0]
        if tier.slots >= tier.most_slots:  # it holds all that there is: what was measured is what it hits
            ends, hits = ends[:2], hits[:2]
        expected = np.maximum(expected, np.interp(slots, ends, hits) if tier.slots else lru)
    return np.asarray(np.clip(np.maximum.accumulate(expected), 0, 1))


def hit_rate(tier: TierReport) -> float | None:
    return tier.hits / tier.lookups if tier.lookups else None


def policies(tier: TierReport) -> tuple[PolicyRate, ...]:
    known = {each.name: each for each in tier.shadows}
    own = known.get(tier.policy, PolicyRate(tier.policy, tier.recent_hit_rate))
    others = [each for each in tier.shadows if each.name != tier.policy]
    return tuple(sorted((own, *others), key=lambda each: -each.hit_rate))


def room_slots(report: CacheReport, tier: TierReport, free_ram: int | None = None) -> int:
    """How many experts this tier could hold in the memory that is free now; never fewer than it has.

    Args:
        free_ram: bytes of unused RAM; None if unknown: then RAM is no limit.
    """
    if tier.record_bytes <= 0:
        return tier.most_slots
    if tier.tier == "ram":
        free = free_ram
    else:
        free = sum(part.nbytes for part in report.memory if part.place != "ram" and part.purpose == FREE)
    if free is None:
        return tier.most_slots
    return min(tier.most_slots, tier.slots + max(0, free) // tier.record_bytes)


def memory_places(parts: tuple[MemoryPart, ...]) -> dict[str, tuple[dict[str, int], int]]:
    """Place -> (bytes by purpose, total); `free` is set to the rest, so that the parts add up."""
    places: dict[str, tuple[dict[str, int], int]] = {}
    for part in parts:
        if part.place not in places and len(places) == MOST_PLACES:
            continue
        amounts, total = places.get(part.place, ({}, 0))
        if part.purpose == TOTAL:
            total = part.nbytes
        else:
            amounts[part.purpose] = amounts.get(part.purpose, 0) + part.nbytes
        places[part.place] = amounts, total
    result: dict[str, tuple[dict[str, int], int]] = {}
    for place, (amounts, reported) in places.items():
        used = sum(nbytes for purpose, nbytes in amounts.items() if purpose != FREE)
        total = max(reported, used)
        result[place] = {**{key: value for key, value in amounts.items() if key != FREE}, FREE: total - used}, total
    return result


def _sound_tier(tier: TierReport) -> TierReport:
    slots, lookups = _count(tier.slots), _count(tier.lookups)
    recent = tier.recent_hit_rate
    return replace(
        tier,
        slots=slots,
        most_slots=max(_count(tier.most_slots), slots, 1),
        record_bytes=_count(tier.record_bytes),
        hits=min(_count(tier.hits), lookups),
        lookups=lookups,
        recent_hit_rate=min(recent, 1.0) if math.isfinite(recent) and recent >= 0 else -1.0,
        shadows=tuple(replace(each, hit_rate=_share(each.hit_rate)) for each in tier.shadows[:MOST_POLICIES]),
        arriving=_count(tier.arriving),
        evictions=_count(tier.evictions),
        prefetched=_count(tier.prefetched),
        prefetches_used=_count(tier.prefetches_used),
        prefetches_wasted=_count(tier.prefetches_wasted),
        miss_s=_amount(tier.miss_s),
    )


def _sound_curve(report: CacheReport) -> tuple[tuple[int, ...], tuple[float, ...]]:
    slots, rates = report.curve_slots, report.curve_hit_rates
    if len(slots) != len(rates) or len(slots) < 2 or not all(map(math.isfinite, rates)):
        return (), ()
    if slots[0] < 0 or slots[-1] > _MOST_COUNT or any(after < one for one, after in itertools.pairwise(slots)):
        return (), ()
    return slots, tuple(_share(rate) for rate in rates)


def _amount(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def _count(value: int) -> int:
    return min(max(value, 0), _MOST_COUNT)
