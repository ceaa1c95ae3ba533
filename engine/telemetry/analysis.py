"""What a recorded timeline says: how busy each lane was, what a token waited for, averages of a range.

Pure functions of numpy records (see `engine.telemetry.records`), fast enough to be asked for every second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.planner.simulator.timeline import LANES
from engine.telemetry.lanes import DECODE, FOR_LATER, PHASE, SAMPLE
from engine.telemetry.records import COUNTERS, Records

OTHER = "other"
"""Time of a step in which no lane did anything that it waited for: Python, sampling, the tokenizer."""


def utilisation(spans: Records, lane: int, start_ns: int, end_ns: int, buckets: int) -> NDArray[np.float64]:
    """Share of each of `buckets` equal parts of [start, end) in which a lane did something, [buckets] in 0..1.

    Work beside each other counts once.
    """
    if buckets <= 0 or end_ns <= start_ns:
        return np.zeros(max(buckets, 0))
    mine = spans[(spans["lane"] == lane) & (spans["end_ns"] > start_ns) & (spans["start_ns"] < end_ns)]
    starts, ends = _union(mine["start_ns"], mine["end_ns"])
    edges = np.linspace(start_ns, end_ns, buckets + 1)
    return np.diff(_busy_before(starts, ends, edges)) / np.diff(edges)


def lane_seconds(spans: Records, start_ns: int, end_ns: int) -> dict[str, float]:
    """Seconds of [start, end) in which each lane did something; lanes that did nothing are left out."""
    seconds = {}
    for lane in np.unique(spans["lane"]).tolist():
        if lane == PHASE or not 0 <= lane < len(LANES):
            continue
        mine = spans[spans["lane"] == lane]
        starts, ends = _union(mine["start_ns"].clip(start_ns, end_ns), mine["end_ns"].clip(start_ns, end_ns))
        if len(starts):
            seconds[LANES[lane]] = float((ends - starts).sum()) / 1e9
    return {name: took for name, took in seconds.items() if took > 0}


@dataclass(frozen=True, slots=True)
class PathPiece:
    """A part of a critical path: from when to when a step waited for this span; -1 is none, which is `OTHER`.

    Attributes:
        span: index among the spans given.
    """

    start_ns: int
    end_ns: int
    span: int


def critical_path(spans: Records, start_ns: int, end_ns: int) -> list[PathPiece]:
    """What [start, end) waited for, in order and without gaps.

    Backwards from the end: whatever ended last was waited for, and what that waited for ended before it began.  Work
    for later (post-fetches, prefetches) is waited for by nobody.
    """
    waited = (spans["lane"] != PHASE) & ~np.isin(spans["name"], list(FOR_LATER))
    inside = waited & (spans["end_ns"] > start_ns) & (spans["start_ns"] < end_ns)
    numbers = np.flatnonzero(inside)
    order = np.argsort(spans["end_ns"][numbers], kind="stable")
    numbers = numbers[order]
    begins = spans["start_ns"][numbers].tolist()
    ends = spans["end_ns"][numbers].tolist()
    pieces: list[PathPiece] = []
    now, index = end_ns, len(numbers) - 1
    while now > start_ns:
        while index >= 0 and begins[index] >= now:
            index -= 1
        if index < 0:
            break
        end = min(ends[index], now)
        if end < now:
            pieces.append(PathPiece(end, now, -1))
        begin = max(begins[index], start_ns)
        pieces.append(PathPiece(begin, end, int(numbers[index])))
        now = begin
        index -= 1
    if now > start_ns:
        pieces.append(PathPiece(start_ns, now, -1))
    return pieces[::-1]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What tokens waited for.

    Attributes:
        tokens: how many.
        seconds: that they took.
        share: lane (or `OTHER`) -> part of that, adding up to 1; biggest first.
        steps: that they came in; 0 if nobody has counted.
        is_batch: whether they are of a batch, many rows to a step.
        others: share of the processor that other programs took meanwhile.
    """

    tokens: int
    seconds: float
    share: Mapping[str, float]
    steps: int = 0
    is_batch: bool = False
    others: float = 0.0

    @property
    def most(self) -> str:
        """The lane waited for most; empty if there are no tokens."""
        return next(iter(self.share), "")


def waiting(spans: Records, steps: Records) -> Waiting:
    """What these steps waited for: the critical path of each, summed."""
    if not len(steps):
        return Waiting(0, 0.0, {})
    spent = dict.fromkeys((*LANES, OTHER), 0)
    spans = spans[(spans["end_ns"] > steps["start_ns"].min()) & (spans["start_ns"] < steps["end_ns"].max())]
    spans = spans[np.argsort(spans["start_ns"], kind="stable")]
    longest = int((spans["end_ns"] - spans["start_ns"]).max(initial=0))
    # A span that reaches into a step began no longer before it than the longest span takes.
    firsts = np.searchsorted(spans["start_ns"], steps["start_ns"] - longest)
    lasts = np.searchsorted(spans["start_ns"], steps["end_ns"])
    for step, first, last in zip(steps, firsts, lasts, strict=True):
        mine = spans[first:last]
        for piece in critical_path(mine, int(step["start_ns"]), int(step["end_ns"])):
            lane = int(mine["lane"][piece.span]) if piece.span >= 0 else -1
            spent[LANES[lane] if 0 <= lane < len(LANES) else OTHER] += piece.end_ns - piece.start_ns
    total = max(1, sum(spent.values()))
    share = {name: part / total for name, part in sorted(spent.items(), key=lambda item: -item[1]) if part}
    return Waiting(int(steps["tokens"].sum()), total / 1e9, share)


@dataclass(frozen=True, slots=True)
class RangeAverages:
    """Averages of a stretch of time.

    Attributes:
        seconds: how long it is.
        tokens: that were decoded in it; tokens_per_s: while something was decoded.
        busy: lane -> share of the time in which it did something.
        per_token: counter -> of each decoded token, on average.
        gigabytes_per_s: lane -> payload while it was busy.
    """

    seconds: float
    tokens: int
    tokens_per_s: float
    busy: Mapping[str, float]
    per_token: Mapping[str, float]
    gigabytes_per_s: Mapping[str, float]


def range_averages(spans: Records, steps: Records, start_ns: int, end_ns: int) -> RangeAverages:
    """Of [start, end); a step belongs to it if it ended in it."""
    seconds = max(end_ns - start_ns, 1) / 1e9
    ended = steps[(steps["end_ns"] > start_ns) & (steps["end_ns"] <= end_ns)]
    decoded = ended[(ended["name"] == DECODE) & (ended["tokens"] > 0)]
    tokens = int(decoded["tokens"].sum())
    decoding_s = float((decoded["end_ns"] - decoded["start_ns"]).sum()) / 1e9
    busy_s = lane_seconds(spans, start_ns, end_ns)
    rates = {}
    for lane in np.unique(spans["lane"]).tolist():
        mine = spans[(spans["lane"] == lane) & (spans["end_ns"] > start_ns) & (spans["end_ns"] <= end_ns)]
        if (moved := int(mine["nbytes"].sum())) and 0 <= lane < len(LANES):
            starts, ends = _union(mine["start_ns"], mine["end_ns"])
            rates[LANES[lane]] = moved / max(int((ends - starts).sum()), 1)
    return RangeAverages(
        seconds,
        tokens,
        tokens / decoding_s if decoding_s > 0 else 0.0,
        {lane: took / seconds for lane, took in busy_s.items()},
        {name: float(decoded[name].sum()) / tokens for name in COUNTERS if decoded[name].any()} if tokens else {},
        rates,
    )


def token_ticks(steps: Records) -> NDArray[np.int64]:
    """Moments at which tokens came, in nanoseconds, [n]."""
    made = np.isin(steps["name"], (DECODE, SAMPLE)) & (steps["tokens"] > 0)
    return np.asarray(steps["end_ns"][made], np.int64)


def joules_per_token(moments_ns: Sequence[int], watts: Sequence[float | None], steps: Records) -> float | None:
    """Energy of these decode steps by samples of power, for each token; None if the machine does not tell.

    The power is taken to change evenly from one sample to the next; a step outside all samples is left out.
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
    """Disjoint intervals, in order, that cover what these cover."""
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
    """Nanoseconds that disjoint, sorted intervals cover before each moment, [n]."""
    if not len(starts):
        return np.zeros(len(moments))
    lengths = (ends - starts).astype(np.float64)
    before = np.concatenate(([0.0], np.cumsum(lengths)))
    index = np.searchsorted(starts, moments, side="right")
    last = np.maximum(index - 1, 0)
    inside = np.clip(moments - starts[last], 0, lengths[last])
    return np.where(index > 0, before[last] + inside, 0.0)
