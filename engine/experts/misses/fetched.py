"""Serves misses by fetching and computing them on the device: one expert is copied while another is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.devices.device import Direction, Event
from engine.experts.latency import Estimate
from engine.experts.misses.way import ExpertLayer, Step, Way
from engine.experts.record_source import Held
from engine.experts.slot_segments import Segment
from engine.telemetry import lanes


@dataclass(slots=True)
class _Fetch:
    """One expert being fetched.

    Attributes:
        row: its row in the segment.
        done: end of its computation, once that is submitted.
    """

    expert: int
    tokens: int
    segment: Segment
    row: int
    copied: Event
    is_staged: bool
    done: Event | None = None


class Fetched(Way):
    """An expert that the cache admits is copied to its slot and stays there.  Others go through staging slots, where
    the next expert arrives while this one is computed (DuoServe, section IV).
    """

    name = "fetch"
    keeps_caller = False

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__(layer)
        self._begun: list[_Fetch] = []

    @property
    def is_possible(self) -> bool:
        """Whether there are staging slots."""
        return self._layer.cache.staging is not None

    @property
    def has_failed(self) -> bool:
        """Whether a copy since the last `observe` has failed."""
        return any(fetch.copied.done() and fetch.copied.failure is not None for fetch in self._begun)

    def estimate(self, busy_s: float) -> Estimate:
        """See `Way.estimate`: queued behind the copies already on the link."""
        cache, latency = self._layer.cache, self._layer.latency
        staged = sum(fetch.is_staged and not fetch.copied.done() for fetch in self._begun)
        transfer_s = latency.transfer_s
        backlog_s = (cache.backlog_bytes / cache.layout.nbytes + staged) * transfer_s
        return Estimate(latency.gpu_s, transfer_s, backlog_s, busy_s)

    def serve(self, step: Step, experts: Sequence[int], held: Held) -> None:
        """Starts fetching these, in this order, and computing each when it has arrived."""
        staging = self._layer.cache.staging
        assert staging is not None
        # Submitting a kernel may block the caller until its expert has arrived, so the copies of the next experts are
        # queued first: as many as there are staging slots.
        ahead: deque[_Fetch] = deque()
        for expert in experts:
            ahead.append(self._copy(step, expert, held))
            if len(ahead) >= len(staging.segment.slots):
                self._compute(step, ahead.popleft())
        while ahead:
            self._compute(step, ahead.popleft())

    def observe(self) -> None:
        """See `Way.observe`."""
        if not self._begun:
            return
        latency = self._layer.latency
        for fetch in self._begun:
            copied, done = fetch.copied, fetch.done
            if done is None or not (copied.done() and done.done()) or copied.failure or done.failure:
                continue
            latency.observe_transfer(copied.ended_s - copied.started_s)
            latency.observe_gpu(fetch.tokens, done.ended_s - done.started_s)
        self._begun = []

    def forget(self) -> None:
        """See `Way.forget`."""
        self._begun = []

    def _copy(self, step: Step, expert: int, held: Held) -> _Fetch:
        cache, device, tokens = self._layer.cache, self._layer.device, step.routing.tokens(expert)
        admitted = cache.admit(step.lookup, expert, held) if step.keeps else None
        if admitted is not None:
            segment, row = cache.locate(admitted[0])
            fetch = _Fetch(expert, tokens, segment, row, admitted[1], is_staged=False)
        else:
            staging = cache.staging
            assert staging is not None
            slot, last_use = staging.take()
            h2d = device.h2d_stream
            if last_use is not None:
                h2d.wait(last_use)
            target = staging.segment.records.records[slot]
            label = lanes.FETCH, None, expert, 1
            copied = h2d.copy(target, held.record(expert), label, direction=Direction.H2D)
            held.until(expert, copied)
            fetch = _Fetch(expert, tokens, staging.segment, slot, copied, is_staged=True)
        self._begun.append(fetch)
        return fetch

    def _compute(self, step: Step, fetch: _Fetch) -> None:
        device, staging = self._layer.device, self._layer.cache.staging
        work = step.sums.on_device(fetch.segment.kernel(self._layer.make_kernel), {fetch.expert: fetch.row})
        device.compute_stream.wait(fetch.copied)
        fetch.done = device.compute_stream.submit(work, (lanes.EXPERTS, None, fetch.expert, 1))
        if fetch.is_staged and staging is not None:
            staging.used(fetch.row, fetch.done)
