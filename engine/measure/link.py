"""The link between host and device: pinned and pageable memory, several sizes, one direction and both at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.devices.device import Device, Direction, Event
from engine.devices.host_memory import allocate_host, available_ram
from engine.devices.memory_budget import MemoryCategory
from engine.devices.pinned_memory import PinnedMemory, measure_pinnable
from engine.hardware.measured import CopyTime
from engine.measure.run import NotMeasuredError, Run


@dataclass(frozen=True)
class Copies:
    """Copies of these sizes, skipping those that do not fit on the device."""

    sizes: tuple[int, ...]
    repeats: int
    estimated_s: float
    name: str = "link to the graphics card"

    def __call__(self, run: Run) -> None:
        device = run.needed_device()
        sizes = [size for size in self.sizes if 2 * size <= min(device.memory.free, run.cold_bytes)]
        if not sizes:
            raise NotMeasuredError(f"{device.name} has too little free memory")
        there = device.memory.allocate(2 * max(sizes), MemoryCategory.STAGING)
        pinned = device.host_memory.allocate(2 * max(sizes))
        pageable = allocate_host(2 * max(sizes))
        try:
            pinned.zero_()
            pageable.zero_()
            for size in sizes:
                for host, is_pinned in ((pinned, True), (pageable, False)):
                    self._one_way(run, device, there, host, size, is_pinned=is_pinned)
                self._both_ways(run, device, there, pinned, size)
        finally:
            device.synchronize()
            device.host_memory.release(pinned)
            device.memory.release(there)

    def _one_way(
        self, run: Run, device: Device, there: torch.Tensor, host: torch.Tensor, size: int, *, is_pinned: bool
    ) -> None:
        for direction in (Direction.H2D, Direction.D2H):
            spans = []
            for _ in range(self.repeats + 1):
                run.check()
                event = _copy(device, direction, there[:size], host[:size])
                event.wait()
                spans.append(event.ended_s - event.started_s)
            # The first copy includes one-time setup; of the others, the fastest was disturbed least.
            run.found(CopyTime(_name(device), direction, is_pinned, False, size, max(min(spans[1:]), 1e-9)))

    def _both_ways(self, run: Run, device: Device, there: torch.Tensor, host: torch.Tensor, size: int) -> None:
        best: dict[Direction, float] = {}
        for _ in range(self.repeats + 1):
            run.check()
            events = {
                Direction.H2D: _copy(device, Direction.H2D, there[:size], host[:size]),
                Direction.D2H: _copy(device, Direction.D2H, there[size : 2 * size], host[size : 2 * size]),
            }
            for event in events.values():
                event.wait()
            for direction, event in events.items():
                best[direction] = min(best.get(direction, 1e9), event.ended_s - event.started_s)
        for direction, seconds in best.items():
            run.found(CopyTime(_name(device), direction, True, True, size, max(seconds, 1e-9)))


@dataclass(frozen=True)
class PinnedLimit:
    """How much host memory can be pinned: tried in a separate process."""

    wanted_bytes: int
    estimated_s: float
    name: str = "pinned memory"

    def __call__(self, run: Run) -> None:
        device = run.needed_device()
        if not isinstance(device.host_memory, PinnedMemory):
            raise NotMeasuredError(f"{device.name} copies from pageable memory just as fast")
        run.check()
        wanted = min(self.wanted_bytes, available_ram())
        run.pinned_limit_bytes = measure_pinnable(
            wanted, device.torch_device.index or 0, timeout_s=self.estimated_s * 3
        )


def _copy(device: Device, direction: Direction, there: torch.Tensor, host: torch.Tensor) -> Event:
    if direction is Direction.H2D:
        return device.h2d_stream.copy(there, host, None, direction=direction)
    return device.d2h_stream.copy(host, there, None, direction=direction)


def _name(device: Device) -> str:
    return device.name.partition("#")[0]
