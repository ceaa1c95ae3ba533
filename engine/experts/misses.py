"""Ways to serve a miss: each is a class here and an entry in `WAYS`.

On the CPU, from the records in RAM, only activations are copied (Fiddler, section 3.2); fetched ones are computed on
the device, where some are copied while others are computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from engine.common import clock
from engine.common.costs import Cost
from engine.devices.device import Event
from engine.experts.activations import Activations
from engine.experts.executor import ExpertExecutor, PartialSums, Routing, Work
from engine.experts.latency import LatencyModel
from engine.experts.record_source import Arrivals, Held, RecordSource
from engine.experts.shares import Estimate, PromptWay
from engine.experts.vram_cache import KernelMaker, Lookup, Segment, Staged, VramCache
from engine.telemetry import lanes


@dataclass
class Step:
    """One call of a layer's experts.

    Attributes:
        hidden: [T, H] on the device; host_hidden: the same on the host, once it has been copied there.
        keeps: whether misses may be copied to slots of the cache.
        only_host: retry after a failure: everything is computed on the CPU, with neither hits nor fetches.
        routing, sums, lookup: which token visits which expert, where the results go, and what the cache had.
        pending: work for the compute stream, to be submitted with the next work; pending_experts: experts in it.
        came_ahead: those of `fetched` whose copy began before the step.
        is_observed: whether the prefetcher has observed this step.
        hits_wait: whether experts on the device have not been submitted yet.
        price: the way that a prompt's misses go, where there is a choice, and seconds that this should take.
    """

    hidden: torch.Tensor
    is_prefill: bool
    keeps: bool
    only_host: bool
    lookup: Lookup
    routing: Routing = field(init=False)
    sums: PartialSums = field(init=False)
    host_hidden: torch.Tensor | None = None
    held: list[Held | Arrivals] = field(default_factory=list)
    pending: list[Work] = field(default_factory=list)
    pending_experts: int = 0
    on_cpu: int = 0
    fetched: int = 0
    came_ahead: int = 0
    hits_on_cpu: int = 0
    is_observed: bool = False
    hits_wait: bool = False
    price: tuple[PromptWay, float] | None = None


class ExpertLayer(ExpertExecutor):
    """One layer with experts in RAM or on disk, some of them also in slots on a device.

    Args:
        layer: its index in the cache.
        source, number: as of `ExpertExecutor`.
        make_kernel: binds a kernel to slots; the same object for all layers that compute alike.
        latency: of an expert, on either side.
    """

    def __init__(
        self,
        cache: VramCache,
        layer: int,
        source: RecordSource,
        make_kernel: KernelMaker,
        latency: LatencyModel,
        activations: Activations,
        number: int,
    ) -> None:
        super().__init__(source, number)
        self.cache, self.layer = cache, layer
        self.make_kernel, self.latency, self.activations = make_kernel, latency, activations
        self.device = cache.device

    def number_in_model(self, number: int) -> None:
        self.cache.layer_numbers[self.layer] = number

    def plan_hits(self, step: Step) -> None:
        """Experts that are on the device are submitted with the next work, unless they have been."""
        if step.hits_wait:
            step.hits_wait = False
            step.pending.append(step.sums.on_device(self.cache.kernel(self.make_kernel), step.lookup.hits))
            step.pending_experts = len(step.lookup.hits)

    def compute_hits(self, step: Step) -> None:
        """Submits experts that are on the device, unless they have been."""
        if step.hits_wait:
            self.plan_hits(step)
            self.submit(step)

    def submit(self, step: Step) -> Event | None:
        """Submits all pending work at once, because each submission has a cost."""
        works, step.pending = step.pending, []
        if not works:
            return None

        def work() -> None:
            for one in works:
                one()

        experts, step.pending_experts = step.pending_experts, 0
        label = lanes.EXPERTS if experts else lanes.FINISH, None, -1, experts
        return self.device.compute_stream.submit(works[0] if len(works) == 1 else work, label)


class Way(ABC):
    """Computes experts of one layer that are not on the device.

    Attributes:
        name: of the mode that uses only this way.
        keeps_caller: it computes on the calling thread, after all other ways have started, and counts as `on_cpu`.
            Otherwise experts are copied to the device, without waiting for them, and count as `fetched`.
        is_possible: whether it can serve a miss now.
        has_failed: whether anything started since the last `observe` has failed, so that another way may succeed.
    """

    name: ClassVar[str]
    keeps_caller: ClassVar[bool]

    def __init__(self, layer: ExpertLayer) -> None:
        self._layer = layer

    @property
    def is_possible(self) -> bool:
        return True

    @property
    def has_failed(self) -> bool:
        return False

    @abstractmethod
    def estimate(self, step: Step, busy_s: float) -> Estimate:
        """Estimates how long experts of a step would take.

        Args:
            busy_s: time until the device has finished its submitted work.
        """

    @abstractmethod
    def serve(self, step: Step, experts: Sequence[int], held: Held) -> None:
        """Adds the output of these misses to `step.sums`, by work submitted before `finish`.

        Args:
            held: their records; copies that outlive this call must be registered with `Held.until`.
        """

    def ahead(self) -> Collection[int]:
        """Experts of its layer that are coming this way already, since before the step: they are its own."""
        return ()

    def bring_ahead(self, most: int) -> None:  # noqa: B027  (most do not)
        """Lets up to so many experts of its layer come, which is next, while other work is done."""

    def prepare(self, step: Step, experts: Sequence[int]) -> None:  # noqa: B027
        """Takes memory for these before other ways are given theirs, whose work would have to be waited for."""

    def observe(self) -> None:  # noqa: B027  (most ways learn while they serve)
        """Corrects the latency model with the times of the previous step, which has ended."""

    def forget(self) -> None:  # noqa: B027
        """Discards what was started in a failed step."""


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
        caller_s = latency.costs.predict(_fetching(step))
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
        self._layer.latency.costs.observe(_fetching(step), 1, took_s / counted)

    def ahead(self) -> Mapping[int, Staged]:
        staging = self._layer.cache.staging
        return staging.ahead(self._layer.layer) if staging is not None else {}

    def bring_ahead(self, most: int) -> None:
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
        latency = self._layer.latency
        for group in self._begun:
            done = group.fetches[0].done
            if done is None or not done.done() or done.failure:
                continue
            for fetch in group.fetches:
                copied_s = fetch.copied.ended_s - fetch.copied.started_s
                latency.costs.observe(Cost.H2D, latency.record_nbytes, copied_s)
            latency.observe_gpu(group.tokens, done.ended_s - done.started_s)
        self._begun = []

    def forget(self) -> None:
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


class OnCpu(Way):
    """Computes with the source's kernel and copies the output to the device."""

    name = "cpu"
    keeps_caller = True
    is_possible = True

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__(layer)
        self._of_token = Estimate(layer.latency.cpu_s, keeps_caller=True)

    def estimate(self, step: Step, busy_s: float) -> Estimate:  # noqa: ARG002
        """See `Way.estimate`: it does not depend on how busy the device is, but a prompt's states have to come, and
        its results to go back."""
        if not step.is_prefill:
            return self._of_token
        latency = self._layer.latency
        back_s = latency.carrying_s(step.hidden[0].nbytes)

        def seconds(tokens: int) -> float:
            return latency.cpu_prompt_s(tokens) + tokens * back_s

        return Estimate(seconds, keeps_caller=True, entry_s=latency.price_of_entering_s(_bytes_to_come(step)))

    def prepare(self, step: Step, experts: Sequence[int]) -> None:
        if step.is_prefill:
            visits = sum(step.routing.tokens(expert) for expert in experts)
            self._layer.activations.outgoing((visits, step.hidden.shape[1]), step.hidden.dtype)

    def serve(self, step: Step, experts: Sequence[int], held: Held) -> None:
        layer, activations = self._layer, self._layer.activations
        begun_s, to_come = clock.now(), _bytes_to_come(step)
        if step.host_hidden is None:
            # The routing came after it, and is here. Hits and fetched experts that are queued are not waited for.
            step.host_hidden = activations.to_host(step.hidden)
        tokens = [step.routing.tokens(expert) for expert in experts]
        out = activations.outgoing((sum(tokens), step.hidden.shape[1]), step.hidden.dtype)
        took_s = step.sums.on_host(layer.source.kernel, step.host_hidden, experts, held.rows, out)
        layer.latency.costs.observe(Cost.CPU_PROMPT_EXPERT if step.is_prefill else Cost.CPU_EXPERT, tokens, took_s)
        added = layer.submit(step)
        if added is not None:
            activations.read_until(added)
        landed, event = activations.to_device(out)
        step.pending.append(step.sums.add(landed, experts))
        layer.device.compute_stream.wait(event)
        if step.is_prefill:
            entering_s = clock.now() - begun_s - took_s - layer.latency.crossing_s(to_come)
            layer.latency.costs.observe(Cost.ENTERING, 1, max(0.0, entering_s))


def _fetching(step: Step) -> Cost:
    return Cost.FETCHING_FOR_PROMPT if step.is_prefill else Cost.FETCHING


def _bytes_to_come(step: Step) -> int:
    """Of the hidden states, which are only on the device."""
    return step.hidden.nbytes if step.host_hidden is None else 0


WAYS: list[type[Way]] = [OnCpu, Fetched]
"""All ways.  The first is always possible, and is the fallback for the others."""

MIXED = "mixed"
"""Each miss in the way that finishes the layer soonest, by measured latencies."""
CACHE_OFF = "off"
"""As mixed, but every lookup is a miss, and nothing is cached."""


def modes() -> list[str]:
    """Modes of serving misses.  All but `MIXED` are for measurements and tests: a single way, or no cache."""
    return [MIXED, *(way.name for way in WAYS), CACHE_OFF]


def ways_of(mode: str, layer: ExpertLayer) -> tuple[Way, list[Way]]:
    """The way that is always possible, and the ways that `mode` uses.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in modes():
        raise ValueError(f"unknown way to serve misses {mode!r}; choose one of {', '.join(modes())}")
    made = [way(layer) for way in WAYS]
    return made[0], [way for way in made if mode in (MIXED, CACHE_OFF, way.name)]
