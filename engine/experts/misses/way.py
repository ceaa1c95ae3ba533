"""Interface of a way to serve misses, and what it works on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from engine.devices.device import Event
from engine.experts.activations import Activations
from engine.experts.executor import ExpertExecutor, StepObserver
from engine.experts.latency import LatencyModel
from engine.experts.partial_sums import PartialSums, Routing, Work
from engine.experts.prompt_choice import PromptWay
from engine.experts.record_source import Arrivals, Held, RecordSource
from engine.experts.shares import Estimate
from engine.experts.slot_segments import KernelMaker
from engine.experts.vram_cache import Lookup, VramCache
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
        source, number, observer: as of `ExpertExecutor`.
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
        observer: StepObserver | None,
    ) -> None:
        super().__init__(source, number, observer)
        self.cache, self.layer = cache, layer
        self.make_kernel, self.latency, self.activations = make_kernel, latency, activations
        self.device = cache.device

    def number_in_model(self, number: int) -> None:
        """See `ExpertExecutor.number_in_model`."""
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
