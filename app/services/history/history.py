"""Everything the Monitor keeps of the past; not thread-safe.  Times are nanoseconds of one clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from app.services.history.gauges import BucketSeries, Floats, GaugeHistory, gauges_of, spread
from engine.common.lanes import TRACKS
from engine.hardware.sensors import SensorSample
from engine.telemetry.lanes import (
    BATCH_STEP,
    DECODE,
    ELSEWHERE,
    JOB,
    PHASE,
    PICTURES,
    PREFILL,
    PROMPT,
    QUEUED,
    READING,
    REQUESTS,
    SAMPLE,
    SWEEPS,
    WRITING,
    WRITTEN_ELSEWHERE,
)
from engine.telemetry.records import Records, no_spans, no_steps

MOST_RUNS = 20_000
_GAP_NS = 2_000_000
_KIND = {PROMPT: PREFILL, SAMPLE: PREFILL}
"""Phases that are part of another phase's run."""


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """Consecutive steps of one phase (`PREFILL`, `DECODE`, `BATCH_STEP`, or another name).

    Attributes:
        first_step: number of the first of them.
    """

    phase: int
    request: int
    start_ns: int
    end_ns: int
    tokens: int
    first_step: int = -1


class RunHistory:
    def __init__(self) -> None:
        self._runs: deque[PhaseRun] = deque(maxlen=MOST_RUNS)

    def add(self, steps: Records) -> None:
        phases, requests = steps["name"].tolist(), steps["request"].tolist()
        starts, ends, tokens = steps["start_ns"].tolist(), steps["end_ns"].tolist(), steps["tokens"].tolist()
        numbers = steps["step"].tolist()
        for phase, request, start, end, made, number in zip(
            phases, requests, starts, ends, tokens, numbers, strict=True
        ):
            kind = _KIND.get(phase, phase)
            read = made if phase in (PREFILL, DECODE, BATCH_STEP) else 0  # a prompt's tokens count once
            last = self._runs[-1] if self._runs else None
            if last is not None and (last.phase, last.request) == (kind, request) and start - last.end_ns <= _GAP_NS:
                self._runs[-1] = replace(last, end_ns=max(end, last.end_ns), tokens=last.tokens + read)
            else:
                self._runs.append(PhaseRun(kind, request, start, end, read, number))

    def between(self, start_ns: float, end_ns: float) -> list[PhaseRun]:
        found = []
        for run in reversed(self._runs):
            if run.end_ns <= start_ns:
                break
            if run.start_ns < end_ns:
                found.append(run)
        return found[::-1]

    def last_request(self, before_ns: float) -> list[PhaseRun]:
        found: list[PhaseRun] = []
        for run in reversed(self._runs):
            if not found and not (run.phase == DECODE and run.start_ns < before_ns):
                continue
            if found and run.request != found[-1].request:
                break  # step numbers restart with each engine
            found.append(run)
        return found[::-1]

    def copy(self) -> RunHistory:
        other = RunHistory()
        other._runs = self._runs.copy()
        return other


_EARLY_NS = 100_000_000
_LATE_NS = 10_000_000_000
MOST_SPAN_NS = 3_600_000_000_000
"""No span lasts an hour."""


class ClockAlignment:
    """The two processes share a clock on every system we know; where they do not, or a clock jumps, times are shifted.

    A message is taken to have been sent when it arrived, within the latency of a pipe.
    """

    def __init__(self) -> None:
        self.shift_ns = 0
        """Added to the engine's times."""

    def observe(self, clock_ns: int, now_ns: int) -> bool:
        """Compare the engine's `clock_ns` with `now_ns` here; returns whether the engine's clock has jumped."""
        late_ns = now_ns - (clock_ns + self.shift_ns)
        if -_EARLY_NS <= late_ns <= _LATE_NS:
            return False
        self.shift_ns = now_ns - clock_ns
        return True

    def aligned(self, records: Records, now_ns: int) -> Records:
        """Records on the window's clock, without impossible ones that end before they begin or lie in the future."""
        starts, ends = records["start_ns"], records["end_ns"]
        limit_ns = now_ns - self.shift_ns + _EARLY_NS
        sound = (ends >= starts) & (starts >= max(0, limit_ns - 2 * MOST_SPAN_NS)) & (ends <= limit_ns)
        sound &= ends - np.maximum(starts, 0) < MOST_SPAN_NS
        if not sound.all():
            records = records[sound]
        if self.shift_ns:
            records = records.copy()
            records["start_ns"] += self.shift_ns
            records["end_ns"] += self.shift_ns
        return records


MOST_SPANS = 2**19
"""27 MB: some 40 seconds of the fastest decode."""
MOST_STEPS = 2**15
MOST_MARKS = 500
MOST_REQUESTS = 2**14
"""Pieces of what requests did."""
_PER_DEVICE = frozenset(number for number, track in enumerate(TRACKS) if track.per_device)
_WITH_BYTES = frozenset(number for number, track in enumerate(TRACKS) if track.moves)
MOST_DEVICES = 16
EXPERT_KINDS = {"hit": "hits", "fetched": "fetched", "cpu": "on_cpu"}
"""How a step's experts were served: from video memory, fetched into it, or computed on the CPU."""


_TAIL_NS = 2_000_000_000
"""Spans that arrive later than this may be counted twice where they overlap others of their lane."""

Moments = NDArray[np.int64]


class RecordHistory:
    """At least the last `most` records, in whole chunks; read by time range."""

    def __init__(self, most: int, empty: Records) -> None:
        self.most = most
        self._empty = empty
        self._pieces: deque[tuple[int, int, Records]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def start_ns(self) -> int | None:
        return min((first for first, _, _ in self._pieces), default=None)

    def add(self, records: Records) -> None:
        for piece in [records[at : at + self.most] for at in range(0, len(records), self.most)]:
            self._pieces.append((int(piece["start_ns"].min()), int(piece["end_ns"].max()), piece))
            self._count += len(piece)
        while len(self._pieces) > 1 and self._count - len(self._pieces[0][2]) >= self.most:
            self._count -= len(self._pieces.popleft()[2])

    def between(self, start_ns: int, end_ns: int) -> Records:
        found = [piece for first, last, piece in self._pieces if last > start_ns and first < end_ns]
        if not found:
            return self._empty
        joined = joined_records(found)
        inside: NDArray[np.bool_] = (joined["end_ns"] > start_ns) & (joined["start_ns"] < end_ns)
        return joined[inside]

    def last(self, count: int) -> Records:
        found: list[Records] = []
        wanted = count
        for _, _, piece in reversed(self._pieces):
            if wanted <= 0:
                break
            found.append(piece[-wanted:])
            wanted -= len(found[-1])
        return joined_records(found[::-1]) if found else self._empty

    def copy(self) -> RecordHistory:
        other = RecordHistory(self.most, self._empty)
        other._pieces, other._count = self._pieces.copy(), self._count
        return other


def joined_records(pieces: list[Records]) -> Records:
    """Concatenate chunks of one dtype.

    As bytes: numpy would compare the fields of each pair of chunks, which takes longer than copying them.
    """
    if len(pieces) == 1:
        return pieces[0]
    dtype = pieces[0].dtype
    raw = np.dtype((np.void, dtype.itemsize))
    return np.concatenate([np.ascontiguousarray(piece).view(raw) for piece in pieces]).view(dtype)


class BusyTime:
    def __init__(self) -> None:
        self.series = BucketSeries()
        self._starts: Moments = np.empty(0, np.int64)
        self._ends: Moments = np.empty(0, np.int64)

    def add(self, starts: Moments, ends: Moments) -> None:
        if not len(starts):
            return
        # Only spans that reach into the new ones can overlap them.
        first = int(np.searchsorted(self._ends, starts.min(), side="right"))
        old = self._starts[first:], self._ends[first:]
        new = union(np.concatenate((old[0], starts)), np.concatenate((old[1], ends)))
        begin, busy = spread(*new, (new[1] - new[0]).astype(np.float64))
        if len(old[0]):
            old_begin, old_busy = spread(*old, (old[1] - old[0]).astype(np.float64))
            busy[old_begin - begin : old_begin - begin + len(old_busy)] -= old_busy
        self.series.add(begin, busy)
        starts = np.concatenate((self._starts[:first], new[0]))
        ends = np.concatenate((self._ends[:first], new[1]))
        recent = int(np.searchsorted(ends, ends[-1] - _TAIL_NS))
        self._starts, self._ends = starts[recent:], ends[recent:]


def union(starts: Moments, ends: Moments) -> tuple[Moments, Moments]:
    order = np.argsort(starts, kind="stable")
    starts, furthest = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > furthest[:-1]))
    last = np.concatenate((np.flatnonzero(first)[1:] - 1, [len(starts) - 1]))
    return starts[first], furthest[last]


def experts_met(steps: Records, kind: str) -> Floats:
    """Experts served this way in each step, [n].

    The engine counts a batch step with many tokens as it counts a prefill; a prefill itself is not counted.
    """
    name = EXPERT_KINDS[kind]
    many = np.where(steps["name"] == BATCH_STEP, steps[f"prefill_{name}"], 0)
    return np.asarray(steps[name] + many, np.float64)


def of_last_kind(steps: Records) -> Records:
    made = steps[np.isin(steps["name"], (DECODE, BATCH_STEP)) & (steps["tokens"] > 0)]
    return made[made["name"] == made["name"][-1]] if len(made) else made


@dataclass(frozen=True, slots=True)
class Mark:
    at_ns: int
    text: str


class History:
    def __init__(self, most_spans: int = MOST_SPANS, most_steps: int = MOST_STEPS) -> None:
        self._spans = RecordHistory(most_spans, no_spans())
        self._steps = RecordHistory(most_steps, no_steps())
        self._requests = RecordHistory(MOST_REQUESTS, no_spans())
        self._pictures = RecordHistory(MOST_REQUESTS, no_spans())
        self.places: dict[int, str] = {}
        """Which endpoint answers a request, by its number; for those that another server answers."""
        self._runs = RunHistory()
        self._gauges = GaugeHistory()
        self._busy: dict[tuple[int, int], BusyTime] = {}
        self._sums: dict[str, BucketSeries] = {}
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)
        self.start_ns: int | None = None
        self.end_ns: int | None = None
        self.revision = 0
        """Changes whenever something is added."""

    # --- adding -----------------------------------------------------------------------------------

    def add_spans(self, spans: Records) -> None:
        """Add completed spans, in any order; phases come from steps instead."""
        if not len(spans):
            return
        self._spans.add(spans)
        for lane in np.unique(spans["lane"]).tolist():
            if lane == PHASE:
                continue
            mine = spans[spans["lane"] == lane]
            if lane == PICTURES:
                self._pictures.add(mine)
            for device in np.unique(mine["device"]).tolist() if lane in _PER_DEVICE else [0]:
                if not 0 <= device < MOST_DEVICES:
                    continue
                part = mine[mine["device"] == device] if lane in _PER_DEVICE else mine
                starts, ends = part["start_ns"].astype(np.int64), part["end_ns"].astype(np.int64)
                self._busy.setdefault((lane, device), BusyTime()).add(starts, ends)
            if lane == REQUESTS:
                self._requests.add(mine)
                for name in (WRITING, READING, QUEUED, JOB, ELSEWHERE, WRITTEN_ELSEWHERE):
                    part = mine[mine["name"] == name]
                    self._add_sum(f"requests {name}", part, (part["end_ns"] - part["start_ns"]).astype(np.float64))
            if lane == SWEEPS:
                for name in (WRITING, READING, JOB):
                    part = mine[mine["name"] == name]
                    self._add_sum(f"swept {name}", part, part["count"].astype(np.float64))
            if lane in _WITH_BYTES:
                self._add_sum(f"bytes {lane}", mine, mine["nbytes"].astype(np.float64))
        self._reach(int(spans["start_ns"].min()), int(spans["end_ns"].max()))

    def add_steps(self, steps: Records) -> None:
        if not len(steps):
            return
        self._steps.add(steps)
        self._runs.add(steps)
        decoded = steps[np.isin(steps["name"], (DECODE, BATCH_STEP)) & (steps["tokens"] > 0)]
        self._add_sum("tokens", decoded, decoded["tokens"].astype(np.float64))
        self._add_sum("decoding", decoded, (decoded["end_ns"] - decoded["start_ns"]).astype(np.float64))
        for kind in EXPERT_KINDS:
            met = experts_met(steps, kind)
            if met.any():
                self._add_sum(kind, steps, met)
        self._reach(int(steps["start_ns"].min()), int(steps["end_ns"].max()))

    def add_sample(self, at_ns: int, sample: SensorSample) -> None:
        self._gauges.add(at_ns, gauges_of(sample))
        self._reach(at_ns, at_ns)

    def add_gauges(self, at_ns: int, values: dict[str, float | None]) -> None:
        self._gauges.add(at_ns, values)
        self._reach(at_ns, at_ns)

    def add_mark(self, at_ns: int, text: str) -> None:
        self._marks.append(Mark(at_ns, text))
        self.revision += 1

    # --- reading ----------------------------------------------------------------------------------

    @property
    def has_engine(self) -> bool:
        return bool(self._busy) or bool(self._sums)

    @property
    def has_copies(self) -> bool:
        """Whether anything was ever copied to or from a device, or computed on one."""
        return any(lane in _PER_DEVICE for lane, _ in self._busy)

    @property
    def has_experts(self) -> bool:
        """Whether any expert was ever used: dense models have none."""
        return any(kind in self._sums for kind in EXPERT_KINDS)

    def devices(self, lane: int) -> list[int]:
        return sorted(device for mine, device in self._busy if mine == lane)

    def busy(self, lane: int, edges_ns: Floats) -> Floats:
        """Share of the time between neighbouring edges that a lane was busy, [n] in 0..1; the mean over devices."""
        mine = [busy.series for (number, _), busy in self._busy.items() if number == lane]
        total = sum((series.read(edges_ns) for series in mine), np.zeros(len(edges_ns) - 1))
        return np.asarray(np.clip(total / np.diff(edges_ns) / max(len(mine), 1), 0.0, 1.0))

    def bytes_per_s(self, lane: int, edges_ns: Floats) -> Floats:
        return self._read_sum(f"bytes {lane}", edges_ns) / np.diff(edges_ns) * 1e9

    def tokens_per_s(self, edges_ns: Floats) -> Floats:
        """Decode rate while decoding, [n]; NaN where nothing was decoded."""
        tokens, decoding = self._read_sum("tokens", edges_ns), self._read_sum("decoding", edges_ns)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.where(decoding > 0.01 * np.diff(edges_ns), tokens / decoding * 1e9, np.nan))

    def experts(self, edges_ns: Floats) -> Floats:
        """Shares of experts that were hits, fetched, and computed on the CPU, [3, n]; 0 where none were used."""
        counted = np.stack([self._read_sum(kind, edges_ns) for kind in EXPERT_KINDS])
        total = counted.sum(axis=0)
        return np.asarray(counted / np.where(total > 1e-6, total, np.inf))

    def requests_between(self, start_ns: int, end_ns: int) -> Records:
        """What requests did in a range, as far as it is still kept singly: long after other spans."""
        return self._requests.between(start_ns, end_ns)

    def requests(self, edges_ns: Floats) -> Floats:
        """How many requests were being written, read, and waiting, here or at other servers, and how many jobs went on,
        on average between neighbouring edges, [4, n]."""
        doings = ((WRITING, WRITTEN_ELSEWHERE), (READING,), (QUEUED, ELSEWHERE), (JOB,))
        spent = [sum(self._read_sum(f"requests {name}", edges_ns) for name in names) for names in doings]
        return np.asarray(np.stack(spent) / np.diff(edges_ns))

    def swept_per_s(self, edges_ns: Floats) -> Floats:
        """Tokens per second of answers, of prompts and of jobs that sweeps took between neighbouring edges, [3, n]."""
        taken = [self._read_sum(f"swept {name}", edges_ns) for name in (WRITING, READING, JOB)]
        return np.asarray(np.stack(taken) / np.diff(edges_ns) * 1e9)

    def gauge(self, name: str, edges_ns: Floats) -> Floats:
        return self._gauges.read(name, edges_ns)

    def knows_gauge(self, name: str) -> bool:
        return self._gauges.knows(name)

    def power(self) -> tuple[list[int], list[float | None]]:
        at, gpu = self._gauges.samples("gpu_power")
        _, cpu = self._gauges.samples("cpu_power")
        known = np.isfinite(gpu) | np.isfinite(cpu)
        watts = np.nan_to_num(gpu) + np.nan_to_num(cpu)
        return at.tolist(), [float(value) if there else None for value, there in zip(watts, known, strict=True)]

    def pictures_between(self, start_ns: int, end_ns: int) -> Records:
        """Spans of reading pictures: apart, as these are asked for over minutes on the window's thread."""
        return self._pictures.between(start_ns, end_ns)

    def spans_between(self, start_ns: int, end_ns: int) -> Records:
        return self._spans.between(start_ns, end_ns)

    def steps_between(self, start_ns: int, end_ns: int) -> Records:
        return self._steps.between(start_ns, end_ns)

    def last_steps(self, count: int) -> Records:
        return self._steps.last(count)

    def runs_between(self, start_ns: float, end_ns: float) -> list[PhaseRun]:
        return self._runs.between(start_ns, end_ns)

    def last_request(self, before_ns: float) -> list[PhaseRun]:
        """Phases of the last request with a decode that began before a moment, up to that decode; empty if none."""
        return self._runs.last_request(before_ns)

    def marks_between(self, start_ns: float, end_ns: float) -> list[Mark]:
        return [mark for mark in self._marks if start_ns <= mark.at_ns < end_ns]

    @property
    def spans_since_ns(self) -> int | None:
        return self._spans.start_ns

    def copy(self) -> History:
        other = History(self._spans.most, self._steps.most)
        other._spans, other._steps = self._spans.copy(), self._steps.copy()
        other._runs, other._gauges = self._runs.copy(), self._gauges.copy()
        other._requests, other.places = self._requests.copy(), dict(self.places)
        other._pictures = self._pictures.copy()
        other._sums = {name: series.copy() for name, series in self._sums.items()}
        for key, busy in self._busy.items():
            other._busy[key] = BusyTime()
            other._busy[key].series = busy.series.copy()
        other._marks = self._marks.copy()
        other.start_ns, other.end_ns, other.revision = self.start_ns, self.end_ns, self.revision
        return other

    def _add_sum(self, name: str, records: Records, amounts: Floats) -> None:
        if len(records):
            starts, ends = records["start_ns"].astype(np.int64), records["end_ns"].astype(np.int64)
            self._sums.setdefault(name, BucketSeries()).add(*spread(starts, ends, amounts))

    def _read_sum(self, name: str, edges_ns: Floats) -> Floats:
        series = self._sums.get(name)
        return np.zeros(len(edges_ns) - 1) if series is None else series.read(edges_ns)

    def _reach(self, start_ns: int, end_ns: int) -> None:
        self.start_ns = start_ns if self.start_ns is None else min(self.start_ns, start_ns)
        self.end_ns = end_ns if self.end_ns is None else max(self.end_ns, end_ns)
        self.revision += 1
