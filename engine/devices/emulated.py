"""An emulated graphics card: memory with the card's budget, streams, and a link as slow as the card's.

The CPU computes and stores everything, with a card's semantics: work is asynchronous, copies take as long as on the
profile's link, and memory ends where the profile says.

A CUDA graph is emulated by recording torch operators with their tensors, and replaying them. Results go to the same
memory as in the capture, as on a card, so code that forgets that numbers and addresses are baked into a graph fails
here too. Reading a number back during a capture is an error, as on a card.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.devices.clocked import direction_between
from engine.devices.device import CaptureError, CopyLog, Device, Direction, Graph
from engine.devices.host_memory import PageableMemory, allocate_host
from engine.devices.link import Link
from engine.devices.memory_budget import MemoryBudget
from engine.devices.memory_watch import MemoryWatch, Room
from engine.devices.threaded_stream import Carrier, Span, ThreadedStream
from engine.hardware.profiles import DeviceProfile

_READS_BACK = frozenset(
    {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_consecutive"}
)
"""Operators that would make the host wait for a result or its shape."""
_READS_BACK_IN_PYTHON = frozenset({"tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__"})

_Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[torch.Tensor]]


class RecordedGraph:
    """See `engine.devices.device.Graph`."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps

    def replay(self) -> None:
        for operator, args, kwargs, outs in self._steps:
            for old, new in zip(outs, _tensors(operator(*args, **kwargs)), strict=True):
                # Views of the memory need no replay.
                if _address(new) != _address(old):
                    old.copy_(new)


class RecordedCapture:
    """See `engine.devices.device.Capture`."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._graphs: list[RecordedGraph] = []
        self._recorder: _Recorder | None = None
        self._guard: _Guard | None = None

    def begin(self) -> None:
        self._recorder, self._guard = _Recorder(), _Guard()
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        self._guard.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Graph:
        """See `Capture.end`.  The work has already run while it was recorded."""
        recorder = self._recorder
        assert recorder is not None
        self.abandon()
        graph = RecordedGraph(recorder.steps)
        self._graphs.append(graph)
        self.nbytes += recorder.nbytes
        return graph

    def abandon(self) -> None:
        recorder, guard = self._recorder, self._guard
        self._recorder = self._guard = None
        if recorder is not None and guard is not None:
            guard.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.abandon()
        for graph in self._graphs:
            graph._steps.clear()
        self._graphs, self.nbytes = [], 0


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators and records them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self.nbytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in _READS_BACK:
            raise CaptureError(f"{func.overloadpacket.__name__} reads a number back")
        result = func(*args, **kwargs)
        outs = _tensors(result)
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        for out in outs:
            address = _address(out)
            if address not in given and address not in self._known:
                self._known.add(address)
                self.nbytes += out.untyped_storage().nbytes()
        self.steps.append((func, args, kwargs, outs))
        return result


class _Guard(TorchFunctionMode):
    """Catches calls that never reach the dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS_BACK_IN_PYTHON:
            raise CaptureError(f"Tensor.{func.__name__} reads a number back")
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


OTHERS: dict[str, int] = {}
"""Bytes that other programs hold of emulated devices, by their names: as a second program would take them."""


def open_emulated(profile: DeviceProfile, index: int = 0, vram_bytes: int | None = None) -> Device:
    """Opens an emulated device with its own links.

    Args:
        index: distinguishes devices of one profile.
        vram_bytes: a budget below the profile's.
    """
    name = f"emulated:{profile.name}#{index}"
    total = profile.vram_bytes if vram_bytes is None else min(vram_bytes, profile.vram_bytes)
    memory = MemoryBudget(name, total, allocate_host)

    def room() -> Room:
        # A system that moves memory of its programs to RAM never says that less than nothing is free.
        free = profile.vram_bytes - memory.use().used - OTHERS.get(name, 0)
        return Room(max(0, free), max(0, -free))

    log = CopyLog()
    closing = threading.Event()
    latency_s = profile.link_latency_us / 1e6
    links = {
        Direction.H2D: Link(profile.link_h2d_gbps * 1e9, latency_s, closing.is_set),
        Direction.D2H: Link(profile.link_d2h_gbps * 1e9, latency_s, closing.is_set),
        Direction.P2P: Link(*profile.from_peers, closing.is_set),
    }

    def stream(role: str, usual: Direction | None, *, is_urgent: bool = False, slowdown: float = 1.0) -> ThreadedStream:
        carrier = _carrier(links, memory, usual, is_urgent=is_urgent)
        return ThreadedStream(f"{name} {role}", log, carrier, closing=closing, slowdown=slowdown)

    streams = (
        stream("compute", None, slowdown=profile.compute_slowdown),
        stream("h2d", Direction.H2D),
        stream("d2h", Direction.D2H),
        stream("small copies", None, is_urgent=True),
    )
    device = Device(
        name=name,
        torch_device=torch.device("cpu"),
        memory=memory,
        host_memory=PageableMemory(),
        streams=streams,
        copy_log=log,
        on_close=closing.set,
        new_capture=RecordedCapture,
        watch=MemoryWatch(memory, room, 0),
    )
    # In case it is never closed: threads that compute during interpreter shutdown would crash it.
    weakref.finalize(device, _close, closing, streams)
    return device


def _close(closing: threading.Event, streams: tuple[ThreadedStream, ...]) -> None:
    closing.set()
    for stream in streams:
        stream.close()


def _carrier(
    links: dict[Direction, Link], memory: MemoryBudget, usual: Direction | None, *, is_urgent: bool
) -> Carrier:
    """The copy function of a stream: by explicit direction, the stream's, or the tensors' owners."""

    def carry(
        destination: torch.Tensor, source: torch.Tensor, asked: Direction | None, ready_s: float
    ) -> tuple[Direction, Span]:
        direction = asked or usual or direction_between(memory, destination, source, crosses=is_urgent)
        link = links.get(direction)
        if link is not None:
            return direction, link.carry(destination, source, ready_s, is_urgent=is_urgent)
        started_s = time.perf_counter()
        destination.copy_(source)
        return direction, (started_s, time.perf_counter())

    return carry
