"""One layer's experts on two processors: hits on the device, misses on the CPU or fetched, all at the same time.

Prefill and decode are scheduled apart (DuoServe): decode fills the cache and feeds its policies, a prefill uses what is
there and streams the rest past it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.failures import as_engine_error
from engine.devices.memory_budget import DeviceMemoryError
from engine.experts.activations import Activations
from engine.experts.latency import LatencyModel, split_among
from engine.experts.misses import CACHE_OFF, MIXED, ways_of
from engine.experts.misses.way import ExpertLayer, Step, Way
from engine.experts.partial_sums import PartialSums, Routing
from engine.experts.record_source import Arrivals, Held, RecordSource
from engine.experts.slot_segments import KernelMaker
from engine.experts.vram_cache import Lookup, VramCache
from engine.telemetry.recorder import RECORDER

BUNDLED_BYTES = 2**17
"""Up to this size the hidden states travel with the routing, in case the CPU needs them: a second wait costs more."""
DECODE_TOKENS = 64
"""A step of more tokens is a prefill, which leaves the cache to the decode steps (DuoServe)."""
STEP_ELEMENTS = 2**26
"""Visits of tokens to experts, [T * k, H], that are computed at a time: 128 MiB in bf16.  Longer steps are cut."""


_GIVEN = 4
"""A kernel that had no memory gets one part in so many of the cache's, for the next time."""


class StepObserver(Protocol):
    """Whoever wants to know which experts decode steps use, to predict those to come."""

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Called once all the work of a layer has been handed out, before the CPU does its share.

        Args:
            experts: in ascending order.
            hidden: [T, H], what the experts were given; on the device.
        """


class HybridExperts(ExpertLayer):
    """An `ExpertKernel` for one layer whose experts lie in RAM or below, some of them also in slots of the device.

    Layers of one device share `cache` and `activations`, and are called one after the other, from one thread.

    Args:
        cache, layer, source, make_kernel, latency, activations: see `ExpertLayer`.
        mode: how misses are met, see `engine.experts.misses.modes`.
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
        mode: str = MIXED,
        prefetcher: StepObserver | None = None,
        number: int | None = None,
    ) -> None:
        super().__init__(cache, layer, source, make_kernel, latency, activations)
        self._prefetcher, self._number = prefetcher, layer if number is None else number
        self.meet_by(mode)

    records_itself = True

    def meet_by(self, mode: str) -> None:
        """Misses are met so from the next step on."""
        self.mode = mode
        self._host, self._ways = ways_of(mode, self)
        self._away = [way for way in self._ways if not way.keeps_caller]

    def number_in_model(self, number: int) -> None:
        """Number of its decoder layer, for a timeline."""
        self.cache.layer_numbers[self.layer] = number

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`; all three are on the device.

        Raises:
            EngineError: a kernel or a copy failed and could not be done without, or an expert could not be read.
                Nothing stays pinned, and the streams have recovered if they can.
        """
        return self._step(hidden_states, top_k_index, top_k_weights, len(top_k_index) > DECODE_TOKENS)

    def with_misses_on_cpu(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same, but no expert crosses the link, and the cache is left as it is."""
        ways, self._ways = self._ways, [self._host]
        try:
            return self._step(hidden, index, weights, is_prefill=True)
        finally:
            self._ways = ways

    def _step(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        if not index.numel():
            return torch.zeros_like(hidden)
        tokens, width = index.shape
        pieces = min(tokens, -(-tokens * width * hidden.shape[1] // STEP_ELEMENTS))
        return self._in_pieces(hidden, index, weights, pieces, is_prefill)

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
        keeps = not is_prefill and self.mode != CACHE_OFF
        step = Step(hidden, is_prefill, keeps, False, Lookup(self.layer))
        refused: DeviceMemoryError | None = None
        try:
            result = self._run(step, index, weights)
        except BaseException as error:
            copy_has_failed = any(way.has_failed for way in self._ways)
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
                raise as_engine_error(error, f"{self.device.name} experts") from None
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

    def _recompute(self, failed: Step, missed: list[int], index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A step again, all of it on the CPU: one in which a copy failed, or a kernel had no memory."""
        step = Step(failed.hidden, failed.is_prefill, False, True, Lookup(self.layer))
        try:
            result = self._run(step, index, weights)
        except BaseException as error:
            self._give_up(step)
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise as_engine_error(error, f"{self.device.name} experts") from None
        if self.mode != CACHE_OFF:
            self.cache.count_met(failed.lookup, len(missed), 0, recomputed=step.on_cpu)
        return result

    def _run(self, step: Step, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        routing = step.routing = self._routing(step, index)
        shape = (index.numel(), step.hidden.shape[1])
        sums = step.sums = PartialSums(step.hidden, weights, routing, self.activations.rows(shape, step.hidden.dtype))
        lookup = step.lookup = self._look_up(step, routing)
        if RECORDER.on and RECORDER.uses is not None and not step.is_prefill:
            RECORDER.uses.append((RECORDER.step, RECORDER.layer, routing.experts, tuple(lookup.hits)))
        begun_s = time.perf_counter()
        if lookup.hits and self._cpu_is_sooner(step, routing):
            self._compute_all_here(step)
        else:
            if lookup.hits:
                step.pending.append(sums.on_device(self.cache.kernel(self.make_kernel), lookup.hits))
                step.pending_experts = len(lookup.hits)
            if lookup.misses:
                self.submit(step)
                self._meet_misses(step)
        step.pending.append(sums.finish())
        end = self.submit(step)
        assert end is not None
        self._tell(step)
        if not self.device.compute_follows_caller or end.failure is not None:
            end.wait()
            if lookup.hits and not (step.is_prefill or step.hits_on_cpu or step.fetched):
                self.latency.observe_both(*self._tokens(lookup, routing), time.perf_counter() - begun_s)
        self.cache.release(lookup, end)
        return sums.result

    def _cpu_is_sooner(self, step: Step, routing: Routing) -> bool:
        """Whether a device is better left alone: small experts are computed before it has heard of them."""
        if step.is_prefill or self.mode != MIXED or not self.source.has_all:
            return False
        return self.latency.prefers_cpu_alone(*self._tokens(step.lookup, routing))

    def _tokens(self, lookup: Lookup, routing: Routing) -> tuple[list[int], list[int]]:
        """Of each hit, and of each miss."""
        return [routing.tokens(hit) for hit in lookup.hits], [routing.tokens(miss) for miss in lookup.misses]

    def _compute_all_here(self, step: Step) -> None:
        experts = step.routing.experts
        held = self.source.acquire(experts)
        step.held.append(held)
        if step.lookup.misses:
            self.cache.post_fetch(self.layer, step.lookup.misses, held, max(0, self.source.lendable))
        self._tell(step)
        step.on_cpu, step.hits_on_cpu = len(step.lookup.misses), len(step.lookup.hits)
        self._host.meet(step, experts, held)
        held.release()

    def _routing(self, step: Step, index: torch.Tensor) -> Routing:
        """The step's one sync; small hidden states come with it."""
        tensors = [index]
        if step.hidden.nbytes <= BUNDLED_BYTES:
            tensors.append(step.hidden)
        landed = self.activations.bundle_to_host(tensors)
        step.host_hidden = landed[1] if len(landed) == 2 else None
        for way in self._away:
            way.observe()
        return Routing(landed[0], self.source.num_experts)

    def _look_up(self, step: Step, routing: Routing) -> Lookup:
        if self.mode == CACHE_OFF or step.only_host:
            return Lookup(self.layer, misses=routing.experts, is_use=False)
        look_up = self.cache.hold if step.is_prefill else self.cache.acquire
        return look_up(self.layer, routing.experts)

    def _meet_misses(self, step: Step) -> None:
        """Those whose records are in RAM first, the others as they arrive."""
        busy_s = sum(self.latency.gpu_s(step.routing.tokens(expert)) for expert in step.lookup.hits)
        # Where copies that nobody waits for have all slots in RAM, they go first.
        arrivals = Arrivals(self.source, step.lookup.misses, lambda: self._tell(step), self.cache.cancel)
        step.held.append(arrivals)
        for held, there in arrivals:
            self._meet(step, held, there, busy_s)
            busy_s = 0.0  # what the device has been given meanwhile is in the backlog of the link

    def _meet(self, step: Step, held: Held, experts: list[int], busy_s: float) -> None:
        """Misses whose records are in RAM."""
        here: list[tuple[Way, list[int]]] = []
        on_cpu: list[int] = []
        for way, mine in self._share(step, experts, busy_s):
            if way.keeps_caller:
                here.append((way, mine))
                on_cpu += mine
            else:
                way.meet(step, mine, held)
                step.fetched += len(mine)
        if step.keeps and on_cpu:
            # Behind what is needed now, and beside the CPU, which works from the same records.
            self.cache.post_fetch(self.layer, on_cpu, held, max(0, self.source.lendable))
        self._tell(step)
        step.on_cpu += len(on_cpu)
        for way, mine in here:
            way.meet(step, mine, held)

    def _share(self, step: Step, experts: list[int], busy_s: float) -> list[tuple[Way, list[int]]]:
        """Who is met in which way."""
        if step.only_host:
            return [(self._host, experts)]
        ways = [way for way in self._ways if way.is_possible]
        if len(ways) < 2:
            return [(ways[0] if ways else self._host, experts)]
        late, routing = step.lookup.late, step.routing
        free = [(expert, routing.tokens(expert)) for expert in experts if expert not in late]
        shares = split_among(free, [way.estimate(busy_s) for way in ways])
        if late:  # what is on its way to a slot already is not sent twice
            shares[0] = [*(expert for expert in experts if expert in late), *shares[0]]
        return [(way, mine) for way, mine in zip(ways, shares, strict=True) if mine]

    def _tell(self, step: Step) -> None:
        if self._prefetcher is not None and not (step.is_told or step.is_prefill or step.only_host):
            step.is_told = True
            self._prefetcher.observe(self._number, step.routing.experts, step.hidden)

    def _count(self, step: Step) -> None:
        if self.mode != CACHE_OFF:
            self.cache.count_met(step.lookup, step.on_cpu, step.fetched, hits_on_cpu=step.hits_on_cpu)

    def _give_up(self, step: Step) -> None:
        """Waits until nothing is in flight and lets everything go: the next request starts again."""
        for way in self._ways:
            way.forget()
        with contextlib.suppress(EngineError):  # a device past help says so to whoever uses it next
            self.device.recover()
        self.activations.forget_uses()
        with contextlib.suppress(EngineError):
            self.cache.forget_uses()
        self.cache.release(step.lookup)
        for held in step.held:
            held.release()
