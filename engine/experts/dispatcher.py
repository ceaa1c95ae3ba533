"""One layer's experts on two processors: hits on the device, misses on the CPU or fetched, all at the same time.

Prefill and decode are scheduled apart (DuoServe): decode fills the cache and feeds its policies, a prefill uses what is
there and streams the rest past it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import Event
from engine.devices.failures import as_engine_error
from engine.devices.memory_budget import DeviceMemoryError
from engine.experts.activations import Activations
from engine.experts.fetching import Fetching
from engine.experts.latency import LatencyModel
from engine.experts.partial_sums import PartialSums, Work
from engine.experts.record_source import Held, RecordSource
from engine.experts.routing import Routing
from engine.experts.slot_segments import KernelMaker
from engine.experts.vram_cache import Lookup, VramCache
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER, seconds_ns

BUNDLED_BYTES = 2**17
"""Up to this size the hidden states travel with the routing, in case the CPU needs them: a second wait costs more."""
DECODE_TOKENS = 64
"""A step of more tokens is a prefill, which leaves the cache to the decode steps (DuoServe)."""
STEP_ELEMENTS = 2**26
"""Visits of tokens to experts, [T * k, H], that are computed at a time: 128 MiB in bf16.  Longer steps are cut."""


_GIVEN = 4
"""A kernel that had no memory gets one part in so many of the cache's, for the next time."""


class Misses(StrEnum):
    """How misses are met.  All but `MIXED` are for measurements and tests."""

    MIXED = "mixed"
    CPU_ONLY = "cpu"
    FETCH_ONLY = "fetch"
    CACHE_OFF = "off"  # as mixed, but everything is a miss, and nothing is kept


class StepObserver(Protocol):
    """Whoever wants to know which experts decode steps use, to predict those to come."""

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Called once all the work of a layer has been handed out, before the CPU does its share.

        Args:
            experts: in ascending order.
            hidden: [T, H], what the experts were given; on the device.
        """


@dataclass
class _Step:
    """One call.

    Attributes:
        only_cpu: after a failure: nothing is fetched, and what is on the device is left there.
        pending: work for the compute stream that goes with what comes next; experts that it computes.
    """

    hidden: torch.Tensor
    is_prefill: bool
    only_cpu: bool
    lookup: Lookup
    host_hidden: torch.Tensor | None = None
    held: list[Held] = field(default_factory=list)
    pending: list[Work] = field(default_factory=list)
    pending_experts: int = 0
    on_cpu: int = 0
    fetched: int = 0
    hits_on_cpu: int = 0
    is_told: bool = False


class HybridExperts:
    """An `ExpertKernel` for one layer whose experts lie in RAM or below, some of them also in slots of the device.

    Layers of one device share `cache` and `activations`, and are called one after the other, from one thread.

    Args:
        layer: its number in the cache.
        source: its records in RAM.
        make_kernel: binds a kernel to slots; one object for all layers that compute alike.
        prefetcher: is told of decode steps.
        number: of the layer, for the prefetcher; None is `layer`.
    """

    def __init__(
        self,
        cache: VramCache,
        layer: int,
        source: RecordSource,
        make_kernel: KernelMaker,
        latency: LatencyModel,
        activations: Activations,
        mode: Misses = Misses.MIXED,
        prefetcher: StepObserver | None = None,
        number: int | None = None,
    ) -> None:
        self.mode = mode
        self.cache, self._layer, self._source = cache, layer, source
        self._make_kernel, self._latency, self._activations = make_kernel, latency, activations
        self._prefetcher, self._number = prefetcher, layer if number is None else number
        self._device = cache.device
        self._fetching = Fetching(cache, make_kernel, latency)

    records_itself = True

    def number_in_model(self, number: int) -> None:
        """Number of its decoder layer, for a timeline."""
        self.cache.layer_numbers[self._layer] = number

    @property
    def layer(self) -> int:
        """Its number in the cache."""
        return self._layer

    @property
    def source(self) -> RecordSource:
        """Its records in RAM."""
        return self._source

    @property
    def make_kernel(self) -> KernelMaker:
        """Binds a kernel to slots."""
        return self._make_kernel

    @property
    def latency(self) -> LatencyModel:
        """What is known of how long an expert takes, on either side."""
        return self._latency

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`; all three are on the device.

        Raises:
            EngineError: a kernel or a copy failed and could not be done without, or an expert could not be read.
                Nothing stays pinned, and the streams have recovered if they can.
        """
        if not top_k_index.numel():
            return torch.zeros_like(hidden_states)
        tokens, width = top_k_index.shape
        pieces = min(tokens, -(-tokens * width * hidden_states.shape[1] // STEP_ELEMENTS))
        return self._in_pieces(hidden_states, top_k_index, top_k_weights, pieces, tokens > DECODE_TOKENS)

    def _in_pieces(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, pieces: int, is_prefill: bool
    ) -> torch.Tensor:
        if pieces == 1:
            return self._attempt(hidden, index, weights, is_prefill)
        cut = [tensor.tensor_split(pieces) for tensor in (hidden, index, weights)]
        return torch.cat([self._attempt(*piece, is_prefill) for piece in zip(cut[0], cut[1], cut[2], strict=True)])

    def _attempt(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, is_prefill: bool
    ) -> torch.Tensor:
        """A step, and another way if it fails for want of memory or of a copy."""
        step = _Step(hidden, is_prefill, False, Lookup(self._layer))
        refused: DeviceMemoryError | None = None
        try:
            result = self._run(step, index, weights)
        except BaseException as error:
            copy_has_failed = self._fetching.has_failed
            missed = list(step.lookup.misses)
            self._give_up(step)
            kernel_is_short = isinstance(error, EngineError) and error.code == ErrorCode.NOT_ENOUGH_MEMORY
            if isinstance(error, DeviceMemoryError):
                refused = error
            elif kernel_is_short or (copy_has_failed and isinstance(error, EngineError)):
                pass  # the handler keeps the tensors of the step alive
            elif isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            else:
                raise as_engine_error(error, f"{self._device.name} experts") from None
        else:
            self._count(step)
            return result
        if refused is None:
            if kernel_is_short:
                self.cache.give_back(max(self.cache.nbytes // _GIVEN, 1))
            return self._recompute(step, missed, index, weights)
        if self.cache.give_back(refused.asked):
            return self._attempt(hidden, index, weights, is_prefill)
        if len(index) > DECODE_TOKENS:
            return self._in_pieces(hidden, index, weights, 2, is_prefill)
        raise refused

    def _recompute(self, failed: _Step, missed: list[int], index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A step again, all of it on the CPU: one in which a copy failed, or a kernel had no memory."""
        step = _Step(failed.hidden, failed.is_prefill, True, Lookup(self._layer))
        try:
            result = self._run(step, index, weights)
        except BaseException as error:
            self._give_up(step)
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise as_engine_error(error, f"{self._device.name} experts") from None
        if self.mode is not Misses.CACHE_OFF:
            self.cache.count_met(failed.lookup, len(missed), 0, recomputed=step.on_cpu)
        return result

    def _run(self, step: _Step, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routing = self._routing(step, index)
        shape = (index.numel(), step.hidden.shape[1])
        sums = PartialSums(step.hidden, weights, routing, self._activations.rows(shape, step.hidden.dtype))
        lookup = step.lookup = self._look_up(step, routing)
        if RECORDER.on and RECORDER.uses is not None and not step.is_prefill:
            RECORDER.uses.append((RECORDER.step, RECORDER.layer, routing.experts, tuple(lookup.hits)))
        begun_s = time.perf_counter()
        if lookup.hits and self._cpu_is_sooner(step, routing):
            self._compute_all_here(step, routing, sums)
        else:
            if lookup.hits:
                step.pending.append(sums.on_device(self.cache.kernel(self._make_kernel), lookup.hits))
                step.pending_experts = len(lookup.hits)
            if lookup.misses:
                self._submit(step)
                self._meet_misses(step, routing, sums)
        step.pending.append(sums.finish())
        end = self._submit(step)
        assert end is not None
        self._tell(step, routing)
        if not self._device.compute_follows_caller or end.failure is not None:
            end.wait()
            if lookup.hits and not (step.is_prefill or step.hits_on_cpu or step.fetched):
                self._latency.observe_both(*self._tokens(lookup, routing), time.perf_counter() - begun_s)
        self.cache.release(lookup, end)
        return sums.result

    def _cpu_is_sooner(self, step: _Step, routing: Routing) -> bool:
        """Whether a device is better left alone: small experts are computed before it has heard of them."""
        if step.is_prefill or self.mode is not Misses.MIXED or not self._source.has_all:
            return False
        return self._latency.prefers_cpu_alone(*self._tokens(step.lookup, routing))

    def _tokens(self, lookup: Lookup, routing: Routing) -> tuple[list[int], list[int]]:
        """Of each hit, and of each miss."""
        return [routing.tokens(hit) for hit in lookup.hits], [routing.tokens(miss) for miss in lookup.misses]

    def _compute_all_here(self, step: _Step, routing: Routing, sums: PartialSums) -> None:
        held = self._source.acquire(routing.experts)
        step.held.append(held)
        if step.lookup.misses:
            self.cache.post_fetch(self._layer, step.lookup.misses, held, max(0, self._source.lendable))
        self._tell(step, routing)
        step.on_cpu, step.hits_on_cpu = len(step.lookup.misses), len(step.lookup.hits)
        self._compute_here(step, routing, sums, held, routing.experts)
        held.release()

    def _routing(self, step: _Step, index: torch.Tensor) -> Routing:
        """The step's one sync; small hidden states come with it."""
        tensors = [index]
        if step.hidden.nbytes <= BUNDLED_BYTES:
            tensors.append(step.hidden)
        landed = self._activations.bundle_to_host(tensors)
        step.host_hidden = landed[1] if len(landed) == 2 else None
        self._fetching.observe()
        return Routing(landed[0], self._source.num_experts)

    def _look_up(self, step: _Step, routing: Routing) -> Lookup:
        if self.mode is Misses.CACHE_OFF or step.only_cpu:
            return Lookup(self._layer, misses=routing.experts, is_use=False)
        look_up = self.cache.hold if step.is_prefill else self.cache.acquire
        return look_up(self._layer, routing.experts)

    def _meet_misses(self, step: _Step, routing: Routing, sums: PartialSums) -> None:
        """Those whose records are in RAM first, the others as they arrive, as many at a time as RAM has slots for."""
        left: Sequence[int] = step.lookup.misses
        busy_s = sum(self._latency.gpu_s(routing.tokens(expert)) for expert in step.lookup.hits)
        arriving: dict[Future[None], tuple[int, Held]] = {}
        while left or arriving:
            ready: dict[int, Held] = {}
            if left:
                held = self._source.acquire_ahead(left) if arriving else self._source.acquire(left)
                step.held.append(held)
                ready = {expert: held for expert in held.rows if expert not in held.arriving}
                arriving.update((arrival, (expert, held)) for expert, arrival in held.arriving.items())
                left = held.left
                if not held.rows and not arriving:
                    self._wait_for_room()
                    continue
            if not ready:
                self._tell(step, routing)
                done, _ = wait(arriving, return_when=FIRST_COMPLETED)
                for arrival in done:
                    arrival.result()
                    expert, held = arriving.pop(arrival)
                    ready[expert] = held
            for held in {id(held): held for held in ready.values()}.values():
                mine = [expert for expert in sorted(ready) if ready[expert] is held]
                self._meet(step, routing, sums, held, mine, busy_s)
                held.release(mine)
            busy_s = 0.0  # what the device has been given meanwhile is in the backlog of the link

    def _wait_for_room(self) -> None:
        """All slots in RAM are in use, by copies that nobody waits for: they go first."""
        self.cache.cancel()
        if not self._source.wait_for_copies():
            raise EngineError(ErrorCode.INTERNAL, "All places for experts in RAM are taken and not given back.")

    def _meet(
        self, step: _Step, routing: Routing, sums: PartialSums, held: Held, experts: list[int], busy_s: float
    ) -> None:
        """Misses whose records are in RAM."""
        keeps = not (step.is_prefill or step.only_cpu or self.mode is Misses.CACHE_OFF)
        on_cpu, fetched = self._share(step, routing, experts, busy_s)
        if fetched:
            self._fetching.fetch(sums, step.lookup, routing, fetched, held, keep=keeps)
        if keeps and on_cpu:
            # Behind what is needed now, and beside the CPU, which works from the same records.
            self.cache.post_fetch(self._layer, on_cpu, held, max(0, self._source.lendable))
        self._tell(step, routing)
        step.fetched += len(fetched)
        step.on_cpu += len(on_cpu)
        if on_cpu:
            self._compute_here(step, routing, sums, held, on_cpu)

    def _share(self, step: _Step, routing: Routing, experts: list[int], busy_s: float) -> tuple[list[int], list[int]]:
        """(on the CPU, fetched)."""
        if step.only_cpu or self.mode is Misses.CPU_ONLY or not self._fetching.is_possible:
            return experts, []
        if self.mode is Misses.FETCH_ONLY:
            return [], experts
        # What is on its way to a slot already is not sent twice.
        late = [expert for expert in experts if expert in step.lookup.late]
        free = [(expert, routing.tokens(expert)) for expert in experts if expert not in step.lookup.late]
        on_cpu, fetched = self._latency.split(free, self._fetching.backlog_s, busy_s)
        return [*late, *on_cpu], fetched

    def _compute_here(self, step: _Step, routing: Routing, sums: PartialSums, held: Held, experts: list[int]) -> None:
        if step.host_hidden is None:
            step.host_hidden = self._activations.to_host(step.hidden, "hidden")
        tokens = [routing.tokens(expert) for expert in experts]
        out = self._activations.outgoing((sum(tokens), step.hidden.shape[1]), step.hidden.dtype)
        begun_s = time.perf_counter()
        rows = {expert: held.rows[expert] for expert in experts}
        sums.on_host(self._source.kernel, step.host_hidden, rows, out)
        ended_s = time.perf_counter()
        self._latency.observe_cpu(tokens, ended_s - begun_s)
        if RECORDER.on:
            begun_ns, ended_ns = seconds_ns(begun_s), seconds_ns(ended_s)
            RECORDER.span(lanes.CPU_EXPERTS, lanes.EXPERTS, begun_ns, ended_ns, count=len(experts))
        added = self._submit(step)
        if added is not None:
            self._activations.read_until(added)
        landed, event = self._activations.to_device(out)
        step.pending.append(sums.add(landed, experts))
        self._device.compute_stream.wait(event)

    def _submit(self, step: _Step) -> Event | None:
        """Hands the pending work over, all at once: each time costs."""
        works, step.pending = step.pending, []
        if not works:
            return None

        def work() -> None:
            for one in works:
                one()

        end = self._device.compute_stream.submit(works[0] if len(works) == 1 else work)
        if RECORDER.on:
            if (queued := RECORDER.queued) is not None:
                queued.submitted(end)
            experts, step.pending_experts = step.pending_experts, 0
            name = lanes.EXPERTS if experts else lanes.FINISH
            RECORDER.event(end, lanes.GPU, name, count=experts, device=self._device.index)
        return end

    def _tell(self, step: _Step, routing: Routing) -> None:
        if self._prefetcher is not None and not (step.is_told or step.is_prefill or step.only_cpu):
            step.is_told = True
            self._prefetcher.observe(self._number, routing.experts, step.hidden)

    def _count(self, step: _Step) -> None:
        if self.mode is not Misses.CACHE_OFF:
            self.cache.count_met(step.lookup, step.on_cpu, step.fetched, hits_on_cpu=step.hits_on_cpu)

    def _give_up(self, step: _Step) -> None:
        """Waits until nothing is in flight and lets everything go: the next request starts again."""
        self._fetching.forget()
        with contextlib.suppress(EngineError):  # a device past help says so to whoever uses it next
            self._device.recover()
        self._activations.forget_uses()
        with contextlib.suppress(EngineError):
            self.cache.forget_uses()
        self.cache.release(step.lookup)
        for held in step.held:
            held.release()
