"""Serves misses by fetching and computing them on the device: some are copied while others are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from engine.common import clock
from engine.devices.device import Event
from engine.experts.misses.way import ExpertLayer, Step, Way
from engine.experts.record_source import Held
from engine.experts.shares import Estimate
from engine.experts.slot_segments import Segment
from engine.experts.staging import Staged
from engine.telemetry import lanes

_FEWEST_TOGETHER = 8
"""Experts of a prompt's groups: submitting a group costs the host as much time as copying one or two experts."""
_QUEUED = 3
"""Groups whose copies are queued before the first of them is computed."""


@dataclass(slots=True)
class _Fetch:
    """One expert being fetched.

    Attributes:
        row: its row in the segment.
        done: end of its group's computation, once that is submitted.
    """

    expert: int
    segment: Segment
    row: int
    copied: Event
    is_staged: bool
    done: Event | None = None


@dataclass(slots=True)
class _Group:
    """Experts computed by one launch, and the tokens of each."""

    fetches: list[_Fetch]
    tokens: list[int]


class Fetched(Way):
    """An expert that the cache admits is copied to its slot and stays there.  Others go through staging slots."""

    name = "fetch"
    keeps_caller = False

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__(layer)
        self._begun: list[_Group] = []
        self._planning_hits_s = 0.0

    @property
    def is_possible(self) -> bool:
        """Whether there are staging slots."""
        return self._layer.cache.staging is not None

    @property
    def has_failed(self) -> bool:
        """Whether a copy since the last `observe` has failed."""
        fetches = (fetch for group in self._begun for fetch in group.fetches)
        return any(fetch.copied.done() and fetch.copied.failure is not None for fetch in fetches)

    def estimate(self, step: Step, busy_s: float) -> Estimate:
        """See `Way.estimate`: queued behind the copies already on the link."""
        cache, latency = self._layer.cache, self._layer.latency
        staged = cache.staging.arriving if cache.staging is not None else 0
        transfer_s = latency.transfer_s
        backlog_s = (cache.backlog_bytes / cache.layout.nbytes + staged) * transfer_s
        seconds = partial(latency.gpu_s, together=self._together(step))
        caller_s = latency.price_of_fetching_s(is_prompt=step.is_prefill)
        return Estimate(seconds, transfer_s, backlog_s, busy_s, caller_s=caller_s)

    def serve(self, step: Step, experts: Sequence[int], held: Held) -> None:
        """Starts fetching these, those brought ahead first, and computing each group when it has arrived."""
        staging = self._layer.cache.staging
        assert staging is not None
        begun_s, self._planning_hits_s = clock.now(), 0.0
        there = staging.claim(self._layer.layer, experts)
        step.came_ahead += len(there)
        order = [*there, *(expert for expert in experts if expert not in there)]
        together = self._together(step)
        # Submitting a kernel may block the caller until its experts have arrived, so the copies of the next ones are
        # queued first, as far as there are slots.
        waiting: deque[_Group] = deque()
        for begin in range(0, len(order), together):
            some = order[begin : begin + together]
            new = sum(expert not in there for expert in some)
            while waiting and (staging.free < new or len(waiting) == _QUEUED):
                self._compute(step, waiting.popleft())
            waiting.append(self._copy(step, some, there, held))
        while waiting:
            self._compute(step, waiting.popleft())
        # One more in a group that is not full costs next to nothing, so those that are missing in it count, too.
        counted = -(-len(order) // together) * together
        took_s = clock.now() - begun_s - self._planning_hits_s
        self._layer.latency.observe_fetching(counted, took_s, is_prompt=step.is_prefill)

    def ahead(self) -> Mapping[int, Staged]:
        """See `Way.ahead`."""
        staging = self._layer.cache.staging
        return staging.ahead(self._layer.layer) if staging is not None else {}

    def bring_ahead(self, most: int) -> None:
        """See `Way.bring_ahead`."""
        layer, cache = self._layer, self._layer.cache
        source, staging = layer.source, cache.staging
        if staging is None:
            return
        most = min(most, source.lendable)
        absent = cache.absent(layer.layer, range(source.num_experts))[: max(0, most)]
        held = source.hold_present(absent)
        try:
            staging.bring_ahead(layer.layer, [expert for expert in absent if expert in held.rows], held)
        finally:
            held.release()

    def observe(self) -> None:
        """See `Way.observe`."""
        latency = self._layer.latency
        for group in self._begun:
            done = group.fetches[0].done
            if done is None or not done.done() or done.failure:
                continue
            for fetch in group.fetches:
                latency.observe_transfer(fetch.copied.ended_s - fetch.copied.started_s)
            latency.observe_gpu(group.tokens, done.ended_s - done.started_s)
        self._begun = []

    def forget(self) -> None:
        """See `Way.forget`."""
        self._begun = []

    def _together(self, step: Step) -> int:
        """Experts of a group: in a token's step, each is computed when it arrives."""
        staging = self._layer.cache.staging
        if not step.is_prefill or staging is None:
            return 1
        return self._layer.latency.together(_FEWEST_TOGETHER, staging.most_together)

    def _copy(self, step: Step, experts: Sequence[int], there: Mapping[int, Staged], held: Held) -> _Group:
        cache, layer = self._layer.cache, self._layer.layer
        staging, fetches = cache.staging, list[_Fetch]()
        assert staging is not None
        for expert in experts:
            admitted = cache.admit(step.lookup, expert, held) if step.keeps and expert not in there else None
            if admitted is not None:
                segment, row = cache.locate(admitted[0])
                fetches.append(_Fetch(expert, segment, row, admitted[1], is_staged=False))
            else:
                staged = there[expert] if expert in there else staging.bring(layer, expert, held)
                fetches.append(_Fetch(expert, staging.segment, staged.slot, staged.copied, is_staged=True))
        group = _Group(fetches, [step.routing.tokens(expert) for expert in experts])
        self._begun.append(group)
        return group

    def _compute(self, step: Step, group: _Group) -> None:
        if step.hits_wait:  # they are there: only the first copies came before them
            begun_s = clock.now()
            self._layer.compute_hits(step)
            self._planning_hits_s += clock.now() - begun_s
        compute, staging = self._layer.device.compute_stream, self._layer.cache.staging
        fetches = group.fetches
        kernel = fetches[0].segment.kernel(self._layer.make_kernel)
        work = step.sums.on_device(kernel, {fetch.expert: fetch.row for fetch in fetches})
        for fetch in fetches:
            compute.wait(fetch.copied)
        expert = fetches[0].expert if len(fetches) == 1 else -1
        done = compute.submit(work, (lanes.EXPERTS, None, expert, len(fetches)))
        for fetch in fetches:
            fetch.done = done
            if fetch.is_staged and staging is not None:
                staging.used(fetch.row, done)
