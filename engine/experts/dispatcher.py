"""One layer's experts on two processors: hits on the device, misses on the CPU or fetched, all at the same time."""

from __future__ import annotations

import contextlib
import time
from enum import StrEnum

import numpy as np
import torch

from engine.devices.device import Direction, Event
from engine.devices.failures import as_engine_error
from engine.errors import EngineError
from engine.experts.activations import Activations
from engine.experts.bank import BankLayer
from engine.experts.latency import LatencyModel
from engine.experts.partial_sums import PartialSums, partial_sums
from engine.experts.slot_segments import KernelMaker, Segment
from engine.experts.vram_cache import Lookup, VramCache
from engine.kernels.interface import ExpertKernel

BUNDLED_BYTES = 2**17
"""Up to this size the hidden states travel with the routing, in case the CPU needs them: a second wait costs more."""
DECODE_TOKENS = 64
"""A step of more tokens is a prefill, which leaves the cache to the decode steps (DuoServe)."""


class Misses(StrEnum):
    """How misses are met.  All but `MIXED` are for measurements and tests."""

    MIXED = "mixed"
    CPU_ONLY = "cpu_only"
    FETCH_ONLY = "fetch_only"
    CACHE_OFF = "cache_off"  # everything is a miss, and nothing is kept


class HybridExperts:
    """An `ExpertKernel` for one layer whose experts lie in RAM, some of them also in slots of the device.

    Layers of one device share `cache` and `activations`, and are called one after the other, from one thread.

    Args:
        layer: its number in the cache.
        bank: its records in RAM.
        cpu_kernel: bound to `bank`.
        make_kernel: binds a kernel to slots; one object for all layers that compute alike.
    """

    def __init__(
        self,
        cache: VramCache,
        layer: int,
        bank: BankLayer,
        cpu_kernel: ExpertKernel,
        make_kernel: KernelMaker,
        latency: LatencyModel,
        activations: Activations,
        mode: Misses = Misses.MIXED,
    ) -> None:
        self.mode = mode
        self._cache, self._layer, self._bank = cache, layer, bank
        self._cpu_kernel, self._make_kernel = cpu_kernel, make_kernel
        self._latency, self._activations = latency, activations
        self._device = cache.device
        # Copy, computation, tokens of what was fetched: their spans are read when they are surely over.
        self._fetched: list[tuple[Event, Event, int]] = []

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`; all three are on the device.

        Raises:
            EngineError: a kernel or a copy failed.  Nothing stays pinned, and the streams have recovered if they can.
        """
        if not top_k_index.numel():
            return torch.zeros_like(hidden_states)
        lookup = Lookup(self._layer)
        try:
            return self._run(hidden_states, top_k_index, top_k_weights, lookup)
        except BaseException as error:
            self._give_up(lookup)
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise as_engine_error(error, f"{self._device.name} experts") from None

    def _run(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, lookup: Lookup) -> torch.Tensor:
        device, cache, compute = self._device, self._cache, self._device.compute_stream
        chosen, host_weights, host_hidden = self._routing(hidden, index, weights)
        experts = self._bank.num_experts
        uses = np.bincount(np.minimum(chosen, experts).reshape(-1), minlength=experts + 1)[:experts]
        needed = np.flatnonzero(uses).tolist()
        tokens: dict[int, int] = {expert: int(uses[expert]) for expert in needed}
        self._look_up(needed, lookup)
        on_cpu, fetched = self._share(lookup, tokens)
        fills = self.mode is not Misses.CACHE_OFF and hidden.shape[0] <= DECODE_TOKENS

        sums = partial_sums(hidden, index, weights, chosen, experts)
        for segment, slot_of in self._by_segment(lookup):
            compute.submit(sums.on_device(segment.kernel(self._make_kernel), slot_of, len(segment.slots)))
        for expert in fetched:
            self._fetch(sums, expert, tokens[expert], keep=fills)
        if fills:
            # Behind what is needed now, and beside the CPU, which works from the same records.
            cache.post_fetch(self._layer, on_cpu, self._bank)
        if on_cpu:
            if host_hidden is None:
                host_hidden = self._activations.to_host(hidden, "hidden")
            begun_s = time.perf_counter()
            contribution = sums.on_host(self._cpu_kernel, host_hidden, host_weights, on_cpu)
            self._latency.observe_cpu([tokens[expert] for expert in on_cpu], time.perf_counter() - begun_s)
            landed, event = self._activations.to_device(contribution)
            compute.wait(event)
            compute.submit(sums.add(landed, on_cpu))
        end = compute.submit(sums.finish())
        if not device.compute_follows_caller or end.failure is not None:
            end.wait()
        cache.release(lookup, end)
        if self.mode is not Misses.CACHE_OFF:
            cache.count_met(len(on_cpu), len(fetched))
        return sums.result

    def _routing(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> tuple[np.ndarray, torch.Tensor, torch.Tensor | None]:
        """(index [T, k], weights [T, k], hidden [T, H] if it is small) on the host: the step's one sync."""
        width = index.shape[1]
        parts = [index.float(), weights.float()]  # ids are exact in fp32 up to 2**24
        if hidden.numel() * 4 <= BUNDLED_BYTES:
            parts.append(hidden.float())
        bundle = self._activations.to_host(torch.cat(parts, dim=1), "routing")
        self._observe_fetches()
        chosen: np.ndarray = bundle[:, :width].long().numpy()
        host_hidden = bundle[:, 2 * width :].to(hidden.dtype) if len(parts) == 3 else None
        return chosen, bundle[:, width : 2 * width].contiguous(), host_hidden

    def _look_up(self, needed: list[int], lookup: Lookup) -> None:
        if self.mode is Misses.CACHE_OFF:
            lookup.misses = needed
            return
        found = self._cache.acquire(self._layer, needed)
        lookup.hits, lookup.misses, lookup.late = found.hits, found.misses, found.late

    def _share(self, lookup: Lookup, tokens: dict[int, int]) -> tuple[list[int], list[int]]:
        """(on the CPU, fetched)."""
        if self.mode is Misses.CPU_ONLY or self._cache.staging is None:
            return lookup.misses, []
        if self.mode is Misses.FETCH_ONLY:
            return [], lookup.misses
        # What is on its way to a slot already is not sent twice.
        free = [(expert, tokens[expert]) for expert in lookup.misses if expert not in lookup.late]
        backlog_s = self._cache.backlog_bytes / self._cache.layout.nbytes * self._latency.transfer_s
        on_cpu, fetched = self._latency.split(free, backlog_s)
        return [*sorted(lookup.late), *on_cpu], fetched

    def _by_segment(self, lookup: Lookup) -> list[tuple[Segment, dict[int, int]]]:
        grouped: dict[int, tuple[Segment, dict[int, int]]] = {}
        for expert, slot in lookup.hits.items():
            segment, row = self._cache.locate(slot)
            grouped.setdefault(segment.slots.start, (segment, {}))[1][expert] = row
        return [grouped[first] for first in sorted(grouped)]

    def _fetch(self, sums: PartialSums, expert: int, tokens: int, *, keep: bool) -> None:
        """Copies an expert to a staging slot and lets it be computed there, then perhaps keeps it."""
        staging = self._cache.staging
        assert staging is not None
        compute, h2d = self._device.compute_stream, self._device.h2d_stream
        slot, last_use = staging.take()
        record = staging.segment.records.records[slot]
        if last_use is not None:
            h2d.wait(last_use)
        copied = h2d.copy(record, self._bank.records[expert], direction=Direction.H2D)
        compute.wait(copied)
        kernel = staging.segment.kernel(self._make_kernel)
        done = compute.submit(sums.on_device(kernel, {expert: slot}, len(staging.segment.slots)))
        kept = self._cache.keep(self._layer, expert, record) if keep else None
        staging.used(slot, kept or done)
        self._fetched.append((copied, done, tokens))

    def _observe_fetches(self) -> None:
        """Corrects the latency model by what was fetched in the step before, which is over by now."""
        for copied, done, tokens in self._fetched:
            if copied.done() and done.done() and copied.failure is None and done.failure is None:
                self._latency.observe_transfer(copied.ended_s - copied.started_s)
                self._latency.observe_gpu(tokens, done.ended_s - done.started_s)
        self._fetched = []

    def _give_up(self, lookup: Lookup) -> None:
        """Waits until nothing is in flight and lets everything go: the next request starts afresh."""
        self._fetched = []
        with contextlib.suppress(EngineError):  # a device past help says so to whoever uses it next
            self._device.recover()
        self._activations.forget_uses()
        with contextlib.suppress(EngineError):
            self._cache.forget_uses()
        self._cache.release(lookup)
