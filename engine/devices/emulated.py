"""An emulated graphics card: memory with the card's budget, streams, and a link as slow as the card's.

The CPU computes and stores everything, with a card's semantics: work is asynchronous, copies take as long as on the
profile's link, and memory ends where the profile says.
"""

from __future__ import annotations

import threading
import time
import weakref

import torch

from engine.devices.copy_log import CopyLog
from engine.devices.device import Device, Direction
from engine.devices.host_memory import PageableMemory, allocate_host
from engine.devices.link import Link
from engine.devices.memory_budget import MemoryBudget
from engine.devices.recorded_graphs import RecordedCapture
from engine.devices.threaded_stream import Carrier, Span, ThreadedStream
from engine.hardware.profiles import DeviceProfile


def open_emulated(profile: DeviceProfile, index: int = 0, vram_bytes: int | None = None) -> Device:
    """Opens an emulated device with its own links.

    Args:
        index: distinguishes devices of one profile.
        vram_bytes: a budget below the profile's.
    """
    name = f"emulated:{profile.name}#{index}"
    total = profile.vram_bytes if vram_bytes is None else min(vram_bytes, profile.vram_bytes)
    memory = MemoryBudget(name, total, allocate_host)
    log = CopyLog()
    closing = threading.Event()
    latency_s = profile.link_latency_us / 1e6
    links = {
        Direction.H2D: Link(profile.link_h2d_gbps * 1e9, latency_s, closing.is_set),
        Direction.D2H: Link(profile.link_d2h_gbps * 1e9, latency_s, closing.is_set),
    }

    def stream(role: str, usual: Direction | None, *, is_urgent: bool = False, slowdown: float = 1.0) -> ThreadedStream:
        carrier = _carrier(links, memory, usual, is_urgent=is_urgent)
        return ThreadedStream(f"{name} {role}", log, carrier, closing=closing, slowdown=slowdown)

    compute = stream("compute", None, slowdown=profile.compute_slowdown)
    h2d = stream("h2d", Direction.H2D)
    d2h = stream("d2h", Direction.D2H)
    small = stream("small copies", None, is_urgent=True)
    device = Device(
        name=name,
        torch_device=torch.device("cpu"),
        memory=memory,
        host_memory=PageableMemory(),
        compute_stream=compute,
        h2d_stream=h2d,
        d2h_stream=d2h,
        small_copy_stream=small,
        copy_log=log,
        on_close=lambda: _close(closing, (compute, h2d, d2h, small)),
        new_capture=RecordedCapture,
    )
    # In case it is never closed: threads that compute during interpreter shutdown would crash it.
    weakref.finalize(device, _close, closing, (compute, h2d, d2h, small))
    return device


def _close(closing: threading.Event, streams: tuple[ThreadedStream, ...]) -> None:
    closing.set()
    for stream in streams:
        stream.close()


def _carrier(
    links: dict[Direction, Link], memory: MemoryBudget, usual: Direction | None, *, is_urgent: bool
) -> Carrier:
    """The copy function of a stream: by explicit direction, the stream's, or the tensors' owners."""

    def direction_of(destination: torch.Tensor, source: torch.Tensor) -> Direction:
        into_ours, out_of_ours = memory.holds(destination), memory.holds(source)
        if into_ours != out_of_ours:
            return Direction.H2D if into_ours else Direction.D2H
        # Tensors allocated by torch have no known owner: assume that small copies cross the link.
        return Direction.H2D if is_urgent and not into_ours else Direction.D2D

    def carry(
        destination: torch.Tensor, source: torch.Tensor, asked: Direction | None, ready_s: float
    ) -> tuple[Direction, Span]:
        direction = asked or usual or direction_of(destination, source)
        link = links.get(direction)
        if link is not None:
            return direction, link.carry(destination, source, ready_s, is_urgent=is_urgent)
        started_s = time.perf_counter()
        destination.copy_(source)
        return direction, (started_s, time.perf_counter())

    return carry
