"""The engine's recorder of spans: every thread appends to its own ring, and a reader collects them.

It is global per process, like a log: otherwise every timed constructor would need a recorder argument. While off, a
recording point costs one look at `RECORDER.on`. Times are nanoseconds of `time.perf_counter_ns`, the clock of streams
and events.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.common import clock
from engine.telemetry.lanes import (
    CPU_ATTENTION,
    ELSEWHERE,
    HEAD,
    JOB,
    KEPT_DISK,
    KEPT_RAM,
    PHASE,
    QUEUED,
    READING,
    REQUESTS,
    SWEEPS,
    WRITING,
    WRITTEN_ELSEWHERE,
)
from engine.telemetry.layer_log import LayerLog
from engine.telemetry.records import COUNTERS, SPAN, STEP, Records, no_spans, no_steps


class DeviceWork(Protocol):
    """The part of `engine.devices.device.Event` that the recorder reads."""

    def done(self) -> bool: ...
    @property
    def failure(self) -> Exception | None: ...
    @property
    def started_s(self) -> float: ...
    @property
    def ended_s(self) -> float: ...


RING_SPANS = 2**16
"""Capacity per thread: some seconds of the fastest decode."""
RING_STEPS = 2**13

_SPAN_FIELDS = (
    "lane",
    "name",
    "start_ns",
    "end_ns",
    "layer",
    "expert",
    "nbytes",
    "count",
    "device",
    "request",
    "step",
)
_STEP_FIELDS = ("request", "step", "name", "start_ns", "end_ns", "tokens", *COUNTERS)
_NOTHING = (0,) * len(COUNTERS)

CounterSource = Callable[[], tuple[int, ...]]
"""Returns the current counts, in the order of `COUNTERS`."""


class Ring:
    """A thread's spans that were not taken yet; when full, the oldest are dropped and counted.

    One thread appends, one takes, and neither blocks: the two ends of a deque are thread-safe.
    """

    __slots__ = ("appended", "entries", "owner", "taken")

    def __init__(self, capacity: int, owner: threading.Thread | None = None) -> None:
        self.entries: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self.owner = owner
        self.appended = 0
        self.taken = 0

    def append(self, entry: tuple[Any, ...]) -> None:
        """Called by the owner."""
        self.entries.append(entry)
        self.appended += 1

    def take(self) -> list[tuple[Any, ...]]:
        """Called by the reader: takes the entries present at the start of the call."""
        entries, taken = self.entries, []
        for _ in range(len(entries)):
            try:
                taken.append(entries.popleft())
            except IndexError:  # cleared by the owner
                break
        self.taken += len(taken)
        return taken

    @property
    def dropped(self) -> int:
        """Entries dropped before they were taken; exact while the owner is idle."""
        return max(0, self.appended - self.taken - len(self.entries))


class _Mine(threading.local):
    """The calling thread's ring, created at its first span."""

    def __init__(self, rings: list[Ring], capacity: int) -> None:
        self.ring = Ring(capacity, threading.current_thread())
        rings.append(self.ring)


class Recorder:
    """Records while `on`.

    Attributes:
        on: whether anything is recorded; recording points check it first.
        request, step: current request and step of the engine thread; 0 and -1 while idle.
        layer: current decoder layer of the engine thread; -1 outside layers.
        layer_since_ns: end of the previous layer's experts, or start of the phase, unless a native step ended since.
        layers: of few tokens on the CPU, which native code stamps by itself: anything more would be measurable.
        on_cpu: experts of decode steps computed by the CPU where no device cache counts them; many_on_cpu: the same for
            steps with more tokens: prefills, and batches of many rows.
        dense_lane: lane where the caller's thread computes between expert layers; None if it only queues that work, so
            that its time is unknown here.
        queued: then records it with the devices' clocks (`engine.runtime.telemetry.model_telemetry.QueuedDense`);
            otherwise None.
        piece: (name, layer, count) of the captured graph being replayed, for its span.
        uses: called with (step, layer, experts used, hits among them) of each layer of decode steps, if set; or for
            many layers at once, none of whose experts can be hits: arrays (steps, layers, concatenated experts, experts
            per layer) and None.
    """

    def __init__(self, capacity: int = RING_SPANS) -> None:
        self.on = False
        self.request = 0
        self.step = -1
        self.layer = -1
        self.layer_since_ns = 0
        self.layers = LayerLog()
        self.on_cpu = self.many_on_cpu = 0
        self.dense_lane: int | None = CPU_ATTENTION
        self.queued: Any = None
        self.piece: tuple[int, int, int] | None = None
        self.uses: deque[tuple[Any, ...]] | None = None
        self._capacity = capacity
        self._rings: list[Ring] = []
        self._mine = _Mine(self._rings, capacity)
        self._waiting: list[tuple[Any, ...]] = []
        self._steps = Ring(RING_STEPS)
        self._gone = 0
        self._requests = 0
        self._next_step = 0
        self._since_ns = 0
        self._counters: CounterSource | None = None
        self._counted = _NOTHING
        self._taking = threading.Lock()

    def start(self) -> None:
        """Starts recording; earlier records are discarded."""
        self.layer = -1
        self._forget_forward()  # one during which recording was stopped
        self.take_spans()
        self.take_steps()
        self._waiting = []
        with self._taking:
            self.layers.switch(True)
            self.layers.reset()
            for ring in [*self._rings, self._steps]:
                ring.appended = ring.taken = 0
        self._gone = 0
        self._since_ns = self.layer_since_ns = clock.now_ns()
        self._counted = self._counters() if self._counters is not None else _NOTHING
        self.on = True

    def stop(self) -> None:
        """Stops recording; existing records can still be taken."""
        self.on = False
        self.layers.switch(False)

    def count_with(self, counters: CounterSource | None) -> None:
        """Sets the source of step counters, if any."""
        self._counters = counters
        self._counted = counters() if counters is not None else _NOTHING

    @property
    def next_request(self) -> int:
        return self._requests + 1

    def begin_request(self, now_ns: int | None = None) -> None:
        self._requests += 1
        self.resume_request(self._requests, now_ns)

    def resume_request(self, request: int, now_ns: int | None = None) -> None:
        """Later records belong to a request that had begun before: others had their turn meanwhile."""
        self._log_layers()
        self.request = request
        self.step = self._next_step
        self._since_ns = self.layer_since_ns = clock.now_ns() if now_ns is None else now_ns
        self.layer = -1

    def phase(self, name: int, tokens: int, now_ns: int | None = None) -> None:
        """Ends a phase and a step: it lasted since the previous phase, or the start of the request."""
        now_ns = clock.now_ns() if now_ns is None else now_ns
        self._log_layers()
        since_ns, request = self._since_ns, self.request
        step = self._next_step  # not self.step, which is unset if recording started during a request
        self._mine.ring.append((PHASE, name, since_ns, now_ns, -1, -1, 0, tokens, 0, request, step))
        counted = self._counted
        if self._counters is not None:
            self._counted = self._counters()
            counted = tuple(map(operator.sub, self._counted, counted))
        else:
            counted = _NOTHING
        self._steps.append((request, step, name, since_ns, now_ns, tokens, *counted))
        self._next_step = self.step = step + 1
        self._since_ns = self.layer_since_ns = now_ns
        self.layer = -1

    def end_request(self) -> None:
        self._log_layers()
        self.request, self.step, self.layer = 0, -1, -1
        self._forget_forward()

    def span(
        self,
        lane: int,
        name: int,
        start_ns: int,
        end_ns: int,
        layer: int | None = None,
        expert: int = -1,
        nbytes: int = 0,
        count: int = 1,
        device: int = 0,
    ) -> None:
        """Records finished work; `layer` None is the engine thread's current one."""
        ring = self._mine.ring
        # Ring.append inlined: another call would cost 50% more.
        ring.entries.append(
            (
                lane,
                name,
                start_ns,
                end_ns,
                self.layer if layer is None else layer,
                expert,
                nbytes,
                count,
                device,
                self.request,
                self.step,
            )
        )
        ring.appended += 1

    def request_did(self, name: int, start_ns: int, end_ns: int, request: int, tokens: int) -> None:
        """Records what a request did; `request` is of the requests' own numbers."""
        self._mine.ring.append((REQUESTS, name, start_ns, end_ns, -1, -1, 0, tokens, 0, request, -1))

    def swept(self, start_ns: int, written: int, read: int, of_jobs: int = 0) -> None:
        """Records what a sweep that ends now was made of: tokens of answers, and of prompts, to requests, and tokens of
        jobs' rows."""
        end_ns = clock.now_ns()
        for name, tokens in ((WRITING, written), (READING, read), (JOB, of_jobs)):
            if tokens:
                self.span(SWEEPS, name, start_ns, end_ns, layer=-1, count=tokens)

    def event(
        self,
        work: DeviceWork,
        lane: int,
        name: int,
        layer: int | None = None,
        expert: int = -1,
        count: int = 1,
        nbytes: int = 0,
        device: int = 0,
    ) -> None:
        """Records work submitted to a device's stream, timed by the stream's clock.

        Failed or cancelled work has no span.
        """
        if layer is None:
            layer = self.layer
        # Start and end of the span are not known yet.
        self._mine.ring.append((work, lane, name, layer, expert, nbytes, count, device, self.request, self.step))

    def forward(self) -> None:
        """A forward starts; it ends with `head` unless it fails."""
        self.piece = None
        if (queued := self.queued) is not None and self.request:
            queued.begin()

    def head(self) -> None:
        """The forward has ended: the work after the last layer's experts was the head."""
        name, layer, count = self.named(HEAD, -1)
        if (queued := self.queued) is not None:
            queued.head(name, layer, count)
        self.dense(name, self.since_ns, clock.now_ns(), layer, count)

    @property
    def since_ns(self) -> int:
        """Since when the caller's thread does dense work: the end of the last experts, or the start of the phase."""
        return max(self.layer_since_ns, self.layers.ended_ns)

    def dense(self, name: int, start_ns: int, end_ns: int, layer: int, count: int = 1) -> None:
        """Records work of the caller's thread outside experts."""
        if self.dense_lane is not None:
            self.span(self.dense_lane, name, start_ns, end_ns, layer, count=count)

    def named(self, name: int, layer: int) -> tuple[int, int, int]:
        """(name, layer, count) of dense work that ends now: the `piece`'s, once, otherwise these."""
        piece, self.piece = self.piece, None
        return piece or (name, layer, 1)

    def take_spans(self) -> Records:
        """All spans that have ended since the last call, unsorted."""
        with self._taking:
            entries = [entry for ring in self._rings for entry in ring.take()]
            logged = self.layers.take()
            self._forget_ended_threads()
            taken = [entry for entry in entries if len(entry) == len(_SPAN_FIELDS)]
            if len(taken) < len(entries):
                self._waiting += [entry for entry in entries if len(entry) != len(_SPAN_FIELDS)]
            waiting = self._waiting
        still: list[tuple[Any, ...]] = []
        for entry in waiting:
            work = entry[0]
            if not work.done():
                still.append(entry)
            elif work.failure is None:
                _, lane, name, *rest = entry
                taken.append((lane, name, round(work.started_s * 1e9), round(work.ended_s * 1e9), *rest))
        self._waiting = still
        spans = as_records(taken, _SPAN_FIELDS, SPAN) if taken else no_spans()
        if logged is None:
            return spans
        if self.uses is not None and len(logged.steps):
            self.uses.append((logged.steps, logged.layers, logged.experts, logged.counts, None))
        return np.concatenate([spans, logged.spans])

    def take_steps(self) -> Records:
        """All steps that have ended since the last call, in order."""
        taken = self._steps.take()
        return as_records(taken, _STEP_FIELDS, STEP) if taken else no_steps()

    @property
    def dropped_spans(self) -> int:
        """Spans dropped since `start`, because they were not taken in time."""
        rings = sum(ring.dropped for ring in self._rings)
        return self._gone + self.layers.dropped + rings

    @property
    def dropped_steps(self) -> int:
        return self._steps.dropped

    def _log_layers(self) -> None:
        """Logs the stamped layers at the end of their step."""
        if self.on:
            self.on_cpu += self.layers.end_step(self.request, self.step, self.dense_lane)

    def _forget_forward(self) -> None:
        self.piece = None
        if (queued := self.queued) is not None:
            queued.forget()

    def _forget_ended_threads(self) -> None:
        for ring in [ring for ring in self._rings if ring.owner is not None and not ring.owner.is_alive()]:
            if not ring.entries:
                self._gone += ring.dropped
                self._rings.remove(ring)


def as_records(entries: Iterable[tuple[int, ...]], fields: tuple[str, ...], dtype: np.dtype[Any]) -> Records:
    """Tuples of integers, each in the order of `fields`, as records.

    Integers out of a field's range are clamped: a bad value costs one number, not all records.
    """
    columns = np.fromiter(chain.from_iterable(entries), np.int64).reshape(-1, len(fields))
    columns = columns.clip(*_limits(fields, dtype))
    records = np.empty(len(columns), dtype)
    for number, field in enumerate(fields):
        records[field] = columns[:, number]
    return records


@functools.cache
def _limits(fields: tuple[str, ...], dtype: np.dtype[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The least and the greatest number that each field holds, [fields]."""
    kinds = [np.iinfo(dtype[field]) for field in fields]
    return np.array([kind.min for kind in kinds], np.int64), np.array([kind.max for kind in kinds], np.int64)


def seconds_ns(moment_s: float) -> int:
    """A moment of `time.perf_counter` as one of `perf_counter_ns`."""
    return round(moment_s * 1e9)


RECORDER = Recorder()
"""The recorder of this process."""


PIECE_NS = 500_000_000
"""A long phase is recorded in pieces of about this length, so that it can be seen while it lasts."""
_numbers = itertools.count(1)


class RequestLog:
    """Follows a request from now on; costs next to nothing while nothing is recorded."""

    def __init__(self, recorder: Recorder = RECORDER, *, is_elsewhere: bool = False) -> None:
        """`is_elsewhere`: another server answers it, of whose doings only what comes from there is known."""
        self._recorder = recorder
        self._number = next(_numbers)
        self._waits, self._writes = (ELSEWHERE, WRITTEN_ELSEWHERE) if is_elsewhere else (QUEUED, WRITING)
        self._name, self._since_ns, self._tokens, self._told = self._waits, clock.now_ns(), 0, 0

    @property
    def number(self) -> int:
        return self._number

    def reads(self, tokens: int) -> None:
        """It is its turn: a prompt of so many tokens is read."""
        self.ends()
        self._name, self._tokens = READING, tokens

    def reuses(self, from_ram: int, from_disk: int, seconds: float) -> None:
        """So many tokens of its prompt were brought from where they are kept, which took so long until now."""
        if not from_ram + from_disk:
            return
        now_ns = clock.now_ns()
        at_ns = max(self._since_ns, now_ns - round(seconds * 1e9))
        self.ends(at_ns)
        for name, tokens in ((KEPT_RAM, from_ram), (KEPT_DISK, from_disk)):
            end_ns = at_ns + (now_ns - self._since_ns) * tokens // (from_ram + from_disk)
            if tokens and self._recorder.on:
                self._recorder.request_did(name, at_ns, end_ns, self._number, tokens)
            at_ns = end_ns
        self._since_ns = now_ns

    def has_written(self, tokens: int) -> None:
        self._wrote(self._writes, tokens)

    def has_answered(self, tokens: int) -> None:
        """For a job: its rows have so many tokens of answers."""
        self._wrote(JOB, tokens)

    def _wrote(self, name: int, tokens: int) -> None:
        if self._name != name:
            self.ends()
            self._name, self._told = name, 0
        self._tokens = tokens
        if clock.now_ns() - self._since_ns >= PIECE_NS:
            self.ends()

    def ends(self, at_ns: int | None = None) -> None:
        now_ns = clock.now_ns() if at_ns is None else at_ns
        if self._recorder.on:
            tokens = self._tokens - self._told if self._name in (self._writes, JOB) else self._tokens
            self._recorder.request_did(self._name, self._since_ns, now_ns, self._number, tokens)
        self._since_ns, self._told = now_ns, self._tokens
