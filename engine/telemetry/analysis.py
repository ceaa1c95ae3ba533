"""Analysis of a recorded timeline: utilisation of lanes, what tokens waited for, averages of a range.

Pure functions of numpy records (see `engine.telemetry.records`), fast enough to run every second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.common.lanes import WORK
from engine.telemetry.lanes import DECODE, FOR_LATER, PHASE, SAMPLE
from engine.telemetry.records import COUNTERS, Records

OTHER = "other"
"""Time of a step in which no lane was on its critical path: Python, sampling, the tokenizer."""


def utilisation(spans: Records, lane: int, start_ns: int, end_ns: int, buckets: int) -> NDArray[np.float64]:
    """Busy share of a lane in each of `buckets` equal parts of [start, end), [buckets] in 0..1.

    Concurrent work counts once.
    """
    if buckets <= 0 or end_ns <= start_ns:
        return np.zeros(max(buckets, 0))
    mine = spans[(spans["lane"] == lane) & (spans["end_ns"] > start_ns) & (spans["start_ns"] < end_ns)]
    starts, ends = _union(mine["start_ns"], mine["end_ns"])
    edges = np.linspace(start_ns, end_ns, buckets + 1)
    return np.diff(_busy_before(starts, ends, edges)) / np.diff(edges)


def lane_seconds(spans: Records, start_ns: int, end_ns: int) -> dict[str, float]:
    """Busy seconds of each lane in [start, end); idle lanes are left out."""
    seconds = {}
    for lane in np.unique(spans["lane"]).tolist():
        if lane == PHASE or not 0 <= lane < len(WORK):
            continue
        mine = spans[spans["lane"] == lane]
        starts, ends = _union(mine["start_ns"].clip(start_ns, end_ns), mine["end_ns"].clip(start_ns, end_ns))
        if len(starts):
            seconds[WORK[lane]] = float((ends - starts).sum()) / 1e9
    return {name: took for name, took in seconds.items() if took > 0}


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A segment of a critical path: the interval in which a step waited for a span.

    Attributes:
        span: index of the span; -1 for none (`OTHER`).
    """

    start_ns: int
    end_ns: int
    span: int


def critical_path(spans: Records, start_ns: int, end_ns: int) -> list[PathSegment]:
    """The critical path of [start, end), in order and without gaps.

    Backwards from the end: the last span to end was waited for, and its own dependency ended before it began. Work for
    later (post-fetches, prefetches) is never waited for.
    """
    waited = (spans["lane"] != PHASE) & (spans["lane"] < len(WORK)) & ~np.isin(spans["name"], list(FOR_LATER))
    inside = waited & (spans["end_ns"] > start_ns) & (spans["start_ns"] < end_ns)
    numbers = np.flatnonzero(inside)
    order = np.argsort(spans["end_ns"][numbers], kind="stable")
    numbers = numbers[order]
    begins = spans["start_ns"][numbers].tolist()
    ends = spans["end_ns"][numbers].tolist()
    segments: list[PathSegment] = []
    now, index = end_ns, len(numbers) - 1
    while now > start_ns:
        while index >= 0 and begins[index] >= now:
            index -= 1
        if index < 0:
            break
        end = min(ends[index], now)
        if end < now:
            segments.append(PathSegment(end, now, -1))
        begin = max(begins[index], start_ns)
        segments.append(PathSegment(begin, end, int(numbers[index])))
        now = begin
        index -= 1
    if now > start_ns:
        segments.append(PathSegment(start_ns, now, -1))
    return segments[::-1]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What tokens waited for.

    Attributes:
        tokens: number of tokens.
        seconds: their total time.
        share: lane (or `OTHER`) -> share of that time, summing to 1; largest first.
        steps: number of steps; 0 if not counted.
        is_batch: whether they belong to a batch, with many rows per step.
        others: CPU share of other programs meanwhile.
        pictures: that were read for them, which took `pictures_s` seconds.
    """

    tokens: int
    seconds: float
    share: Mapping[str, float]
    steps: int = 0
    is_batch: bool = False
    others: float = 0.0
    pictures: int = 0
    pictures_s: float = 0.0

    @property
    def most(self) -> str:
        """The lane with the largest share; empty if there are no tokens."""
        return next(iter(self.share), "")


def waiting(spans: Records, steps: Records) -> Waiting:
    """What these steps waited for: the sum of their critical paths."""
    if not len(steps):
        return Waiting(0, 0.0, {})
    spent = dict.fromkeys((*WORK, OTHER), 0)
    spans = spans[(spans["end_ns"] > steps["start_ns"].min()) & (spans["start_ns"] < steps["end_ns"].max())]
    spans = spans[np.argsort(spans["start_ns"], kind="stable")]
    longest = int((spans["end_ns"] - spans["start_ns"]).max(initial=0))
    # A span that overlaps a step started at most the longest span's duration before it.
    firsts = np.searchsorted(spans["start_ns"], steps["start_ns"] - longest)
    lasts = np.searchsorted(spans["start_ns"], steps["end_ns"])
    for step, first, last in zip(steps, firsts, lasts, strict=True):
        mine = spans[first:last]
        for segment in critical_path(mine, int(step["start_ns"]), int(step["end_ns"])):
            lane = int(mine["lane"][segment.span]) if segment.span >= 0 else -1
            spent[WORK[lane] if 0 <= lane < len(WORK) else OTHER] += segment.end_ns - segment.start_ns
    total = max(1, sum(spent.values()))
    share = {name: part / total for name, part in sorted(spent.items(), key=lambda item: -item[1]) if part}
    return Waiting(int(steps["tokens"].sum()), total / 1e9, share)


@dataclass(frozen=True, slots=True)
class RangeAverages:
    """Averages of an interval.

    Attributes:
        seconds: its duration.
        tokens: tokens decoded in it; tokens_per_s: while decoding.
        busy: lane -> busy share.
        per_token: counter -> average per decoded token.
        gigabytes_per_s: lane -> payload rate while busy.
    """

    seconds: float
    tokens: int
    tokens_per_s: float
    busy: Mapping[str, float]
    per_token: Mapping[str, float]
    gigabytes_per_s: Mapping[str, float]


def range_averages(spans: Records, steps: Records, start_ns: int, end_ns: int) -> RangeAverages:
    """Averages of [start, end); a step belongs to the interval in which it ended."""
    seconds = max(end_ns - start_ns, 1) / 1e9
    ended = steps[(steps["end_ns"] > start_ns) & (steps["end_ns"] <= end_ns)]
    decoded = ended[(ended["name"] == DECODE) & (ended["tokens"] > 0)]
    tokens = int(decoded["tokens"].sum())
    decoding_s = float((decoded["end_ns"] - decoded["start_ns"]).sum()) / 1e9
    busy_s = lane_seconds(spans, start_ns, end_ns)
    rates = {}
    for lane in np.unique(spans["lane"]).tolist():
        mine = spans[(spans["lane"] == lane) & (spans["end_ns"] > start_ns) & (spans["end_ns"] <= end_ns)]
        if (moved := int(mine["nbytes"].sum())) and 0 <= lane < len(WORK):
            starts, ends = _union(mine["start_ns"], mine["end_ns"])
            rates[WORK[lane]] = moved / max(int((ends - starts).sum()), 1)
    return RangeAverages(
        seconds,
        tokens,
        tokens / decoding_s if decoding_s > 0 else 0.0,
        {lane: took / seconds for lane, took in busy_s.items()},
        {name: float(decoded[name].sum()) / tokens for name in COUNTERS if decoded[name].any()} if tokens else {},
        rates,
    )


def token_ticks(steps: Records) -> NDArray[np.int64]:
    """Times at which tokens were generated, in nanoseconds, [n]."""
    made = np.isin(steps["name"], (DECODE, SAMPLE)) & (steps["tokens"] > 0)
    return np.asarray(steps["end_ns"][made], np.int64)


def joules_per_token(moments_ns: Sequence[int], watts: Sequence[float | None], steps: Records) -> float | None:
    """Energy per token of these decode steps, from power samples; None if unknown.

    Power is interpolated linearly between samples; steps outside all samples are left out.
    """
    known = [(moment, power) for moment, power in zip(moments_ns, watts, strict=True) if power is not None]
    if len(known) < 2:
        return None
    when = np.array([moment for moment, _ in known], np.float64)
    power = np.array([power for _, power in known], np.float64)
    energy = np.concatenate(([0.0], np.cumsum((power[1:] + power[:-1]) / 2 * np.diff(when)))) / 1e9
    seen = steps[(steps["name"] == DECODE) & (steps["start_ns"] >= when[0]) & (steps["end_ns"] <= when[-1])]
    tokens = int(seen["tokens"].sum())
    if not tokens:
        return None
    spent = _energy_at(seen["end_ns"], when, power, energy) - _energy_at(seen["start_ns"], when, power, energy)
    return float(spent.sum()) / tokens


def _energy_at(
    moments: NDArray[np.int64], when: NDArray[np.float64], power: NDArray[np.float64], energy: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Joules since the first sample, [n]."""
    index = np.clip(np.searchsorted(when, moments, side="right") - 1, 0, len(when) - 2)
    since = moments - when[index]
    slope = (power[index + 1] - power[index]) / np.maximum(when[index + 1] - when[index], 1)
    return np.asarray(energy[index] + (power[index] + slope * since / 2) * since / 1e9)


def _union(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The union of intervals as sorted, disjoint intervals."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, furthest = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > furthest[:-1]))
    last = np.concatenate((np.flatnonzero(first)[1:] - 1, [len(starts) - 1]))
    return starts[first], furthest[last]


def _busy_before(
    starts: NDArray[np.int64], ends: NDArray[np.int64], moments: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Nanoseconds covered by disjoint, sorted intervals before each moment, [n]."""
    if not len(starts):
        return np.zeros(len(moments))
    lengths = (ends - starts).astype(np.float64)
    before = np.concatenate(([0.0], np.cumsum(lengths)))
    index = np.searchsorted(starts, moments, side="right")
    last = np.maximum(index - 1, 0)
    inside = np.clip(moments - starts[last], 0, lengths[last])
    return np.where(index > 0, before[last] + inside, 0.0)
