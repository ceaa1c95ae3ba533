"""Experts that are fetched to be computed at once: one is copied over the link while another is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.devices.device import Direction, Event
from engine.experts.latency import LatencyModel
from engine.experts.partial_sums import PartialSums
from engine.experts.record_source import Held
from engine.experts.routing import Routing
from engine.experts.slot_segments import KernelMaker, Segment
from engine.experts.vram_cache import Lookup, VramCache
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER


@dataclass(slots=True)
class _Fetch:
    """One expert on its way.

    Attributes:
        row: of the segment, where it will be.
        done: the end of its computation, once that is submitted.
    """

    expert: int
    tokens: int
    segment: Segment
    row: int
    copied: Event
    is_staged: bool
    done: Event | None = None


class Fetching:
    """Fetches experts of one layer.  Where the cache admits one it is computed in its slot, and stays; else it passes
    through one of the staging slots, the next expert arriving while this one is computed (DuoServe, section IV).
    """

    def __init__(self, cache: VramCache, make_kernel: KernelMaker, latency: LatencyModel) -> None:
        self._cache, self._make_kernel, self._latency = cache, make_kernel, latency
        self._device = cache.device
        self._begun: list[_Fetch] = []

    @property
    def is_possible(self) -> bool:
        """Whether there is a place that any expert can be fetched to."""
        return self._cache.staging is not None

    @property
    def has_failed(self) -> bool:
        """Whether a copy since the last `observe` has failed."""
        return any(fetch.copied.done() and fetch.copied.failure is not None for fetch in self._begun)

    @property
    def backlog_s(self) -> float:
        """How long the link is busy with what it has been given."""
        staged = sum(fetch.is_staged and not fetch.copied.done() for fetch in self._begun)
        return (self._cache.backlog_bytes / self._cache.layout.nbytes + staged) * self._latency.transfer_s

    def fetch(
        self, sums: PartialSums, lookup: Lookup, routing: Routing, experts: Sequence[int], held: Held, *, keep: bool
    ) -> None:
        """Begins to fetch these misses, in this order, and to compute each when it is there.

        Args:
            held: has their records.
            keep: whether they may come into slots of the cache.
        """
        staging = self._cache.staging
        assert staging is not None
        # A card's kernels may hold the caller up until their expert is there, so the copies of the next are queued
        # before: as many as there are staging slots beside the one that computes.
        ahead: deque[_Fetch] = deque()
        for expert in experts:
            ahead.append(self._copy(lookup, expert, routing.tokens(expert), held, keep=keep))
            if len(ahead) >= len(staging.segment.slots):
                self._compute(sums, ahead.popleft())
        while ahead:
            self._compute(sums, ahead.popleft())

    def observe(self) -> None:
        """Corrects the latency model by what was fetched in the step before, which is over by now."""
        for fetch in self._begun:
            copied, done = fetch.copied, fetch.done
            if done is None or not (copied.done() and done.done()) or copied.failure or done.failure:
                continue
            self._latency.observe_transfer(copied.ended_s - copied.started_s)
            self._latency.observe_gpu(fetch.tokens, done.ended_s - done.started_s)
        self._begun = []

    def forget(self) -> None:
        """After a failure: nothing is to be learned from what was begun."""
        self._begun = []

    def _copy(self, lookup: Lookup, expert: int, tokens: int, held: Held, *, keep: bool) -> _Fetch:
        taken_in = self._cache.take_in(lookup, expert, held) if keep else None
        if taken_in is not None:
            segment, row = self._cache.locate(taken_in[0])
            fetch = _Fetch(expert, tokens, segment, row, taken_in[1], is_staged=False)
        else:
            staging = self._cache.staging
            assert staging is not None
            slot, last_use = staging.take()
            h2d = self._device.h2d_stream
            if last_use is not None:
                h2d.wait(last_use)
            target = staging.segment.records.records[slot]
            copied = h2d.copy(target, held.record(expert), direction=Direction.H2D)
            if RECORDER.on:
                RECORDER.event(
                    copied, lanes.H2D, lanes.FETCH, expert=expert, nbytes=target.nbytes, device=self._device.index
                )
            held.until(expert, copied)
            fetch = _Fetch(expert, tokens, staging.segment, slot, copied, is_staged=True)
        self._begun.append(fetch)
        return fetch

    def _compute(self, sums: PartialSums, fetch: _Fetch) -> None:
        compute, staging = self._device.compute_stream, self._cache.staging
        work = sums.on_device(fetch.segment.kernel(self._make_kernel), {fetch.expert: fetch.row})
        compute.wait(fetch.copied)
        fetch.done = compute.submit(work)
        if RECORDER.on:
            RECORDER.event(fetch.done, lanes.GPU, lanes.EXPERTS, expert=fetch.expert, device=self._device.index)
        if fetch.is_staged and staging is not None:
            staging.used(fetch.row, fetch.done)
