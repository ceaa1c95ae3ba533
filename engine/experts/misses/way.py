"""What a way to meet a miss is, and what it has to do with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from engine.devices.device import Event
from engine.experts.activations import Activations
from engine.experts.latency import Estimate, LatencyModel
from engine.experts.partial_sums import PartialSums, Routing, Work
from engine.experts.record_source import Arrivals, Held, RecordSource
from engine.experts.slot_segments import KernelMaker
from engine.experts.vram_cache import Lookup, VramCache
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER


@dataclass
class Step:
    """One call of a layer's experts.

    Attributes:
        hidden: [T, H] on the device; host_hidden: the same on the host, once somebody has brought it there.
        keeps: whether what is missed may come into slots of the cache.
        only_host: after a failure: nothing is fetched, and what is on the device is left there.
        routing, sums, lookup: who visits whom, where the results go, and what the cache had.
        pending: work for the compute stream that goes with what comes next; pending_experts: that it computes.
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
    hits_on_cpu: int = 0
    is_told: bool = False


class ExpertLayer:
    """One layer whose experts lie in RAM or below, some of them also in slots of a device.

    Args:
        layer: its number in the cache.
        source: its records in RAM.
        make_kernel: binds a kernel to slots; one object for all layers that compute alike.
        latency: what is known of how long an expert takes, on either side.
    """

    def __init__(
        self,
        cache: VramCache,
        layer: int,
        source: RecordSource,
        make_kernel: KernelMaker,
        latency: LatencyModel,
        activations: Activations,
    ) -> None:
        self.cache, self.layer, self.source = cache, layer, source
        self.make_kernel, self.latency, self.activations = make_kernel, latency, activations
        self.device = cache.device

    def submit(self, step: Step) -> Event | None:
        """Hands the pending work over, all at once: each time costs."""
        works, step.pending = step.pending, []
        if not works:
            return None

        def work() -> None:
            for one in works:
                one()

        end = self.device.compute_stream.submit(works[0] if len(works) == 1 else work)
        if RECORDER.on:
            if (queued := RECORDER.queued) is not None:
                queued.submitted(end)
            experts, step.pending_experts = step.pending_experts, 0
            name = lanes.EXPERTS if experts else lanes.FINISH
            RECORDER.event(end, lanes.GPU, name, count=experts, device=self.device.index)
        return end


class Way(ABC):
    """Computes experts of one layer that the device has no copy of.

    Attributes:
        name: by which it can be asked for alone.
        keeps_caller: it computes in the calling thread, after all that is begun elsewhere; what it met counts as
            `on_cpu`.  Else the experts come to the device, which the call does not wait for, and count as `fetched`.
        is_possible: whether any expert can be met so now.
        has_failed: whether what was begun since the last `observe` has failed, so that another way may succeed.
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
    def estimate(self, busy_s: float) -> Estimate:
        """How long experts would take.

        Args:
            busy_s: how long the device still computes what it has been given.
        """

    @abstractmethod
    def meet(self, step: Step, experts: Sequence[int], held: Held) -> None:
        """Sees to it that `step.sums` gets what these misses make of their tokens, before `finish`.

        Args:
            held: has their records; what still reads one when this returns has to say so by `Held.until`.
        """

    def observe(self) -> None:  # noqa: B027  (most ways learn while they meet)
        """The step before is over by now: corrects the latency model by what was begun in it."""

    def forget(self) -> None:  # noqa: B027
        """After a failure: nothing is to be learned from what was begun."""
