"""The device interface: streams that run work in order, events that mark its end, memory with a budget, graphs.

The rules are CUDA's. Work of one stream runs in the order of submission; streams run concurrently unless one waits for
another's event. Nothing is known about work until its event is done. An error in submitted work is raised to waiters,
and the stream runs nothing more until `recover`: queued work would use results that do not exist.

A graph is launches of a device, captured once and replayed as a whole. A replay reads and writes the same memory as the
capture; Python numbers are baked in; during a capture nothing may be waited for or read back.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

from engine.common.errors import EngineError
from engine.devices.failures import closed_error
from engine.devices.host_memory import HostMemory
from engine.devices.memory_budget import MemoryBudget, MemoryWatch
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

if TYPE_CHECKING:
    from engine.devices.emulated import Meter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """One successful copy, by `engine.common.clock`; `stream` names the device, too."""

    stream: str
    direction: str
    nbytes: int
    started_s: float
    ended_s: float


class CopyLog:
    """Listeners to a device's copies: called before the event is done, on any thread, so they must be fast."""

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[CopyRecord], None], ...] = ()

    def listen(self, listener: Callable[[CopyRecord], None]) -> Callable[[], None]:
        """Calls `listener` for every copy from now on; call the result to unsubscribe."""
        self._listeners = (*self._listeners, listener)

        def stop() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return stop

    def ended(self, stream: str, direction: str, nbytes: int, started_s: float, ended_s: float) -> None:
        """Called by streams."""
        for listener in self._listeners:
            try:
                listener(CopyRecord(stream, direction, nbytes, started_s, ended_s))
            except Exception:
                _log.exception("a copy listener failed")


class CaptureError(Exception):
    """An operation during a capture cannot be replayed; the message names it."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Runs the work again, in order with the caller's launches."""


class Capture(Protocol):
    """Captures segments of one step, which share memory and are replayed in order, of one thread's launches alone."""

    @property
    def nbytes(self) -> int:
        """Device memory of the segments captured so far."""

    def begin(self) -> None:
        """Starts capturing this thread's launches."""

    def end(self) -> Graph:
        """Ends a segment, which will have run once before the caller's next work.

        Raises:
            CaptureError, RuntimeError: something in it cannot be captured.
        """

    def abandon(self) -> None:
        """Drops the current segment, if any; later launches run normally."""

    def close(self) -> None:
        """Frees the memory; the segments are unusable afterwards.  Idempotent."""


def upload(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """Copies a host tensor, which must not change afterwards, to a device, in order with its stream's work."""
    if place.type in ("cpu", "mps"):  # the same memory
        return tensor.to(place)
    # From pageable memory, a card's copy would block the caller until all queued work is done.
    return tensor.pin_memory().to(place, non_blocking=True)


class Direction(StrEnum):
    """Of a copy: over the link to the device, back, within the device, or from another one."""

    H2D = "h2d"
    D2H = "d2h"
    D2D = "d2d"
    P2P = "p2p"


Label = tuple[int, int | None, int, int]
"""What timelines call a piece of work: (name in `engine.telemetry.lanes`, decoder layer or None for the engine thread's
current one, expert or -1, number of experts)."""

COPY: Label = (lanes.COPY, None, -1, 1)
"""Any copy."""


class Event(Protocol):
    """The end of one unit of work.  Every method may be called from any thread."""

    def done(self) -> bool:
        """Whether the work has ended, successfully or not; never blocks."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the work has ended.  False if that took longer than `timeout_s`.

        Raises:
            EngineError: the work failed, something before it in its stream did, or the device closed.
        """

    @property
    def failure(self) -> EngineError | None:
        """What `wait` would raise, or None while the work is running or if it succeeded."""

    @property
    def started_s(self) -> float:
        """When the work started, on `time.perf_counter`'s clock.  RuntimeError unless done."""

    @property
    def ended_s(self) -> float:
        """When the work ended, on `time.perf_counter`'s clock.  RuntimeError unless done."""


class Stream(ABC):
    """A queue of work that a device runs in order.  Every method may be called from any thread.

    Everything but `close` raises `EngineError` once the stream is closed.  What is submitted with a label is recorded,
    in the lane that the stream's name says.

    Args:
        name: `DEVICE ROLE`, for messages and timeline lanes.
    """

    def __init__(self, name: str, copy_log: CopyLog) -> None:
        self.name, self._copy_log = name, copy_log
        self._failure: EngineError | None = None
        self._closed = False
        device, _, role = name.partition(" ")
        self._lane, self._index = _LANES.get(role, lanes.GPU), device_index(device)

    @property
    def failure(self) -> EngineError | None:
        """The first failure since the last `recover`: later work does not run and fails with it."""
        return self._failure

    def submit(self, work: Callable[[], object], label: Label | None = None) -> Event:
        """Runs `work` after everything before it; its result is dropped, its exception is raised to waiters.

        `work` must not wait for later work of its own stream.

        Args:
            label: of its span in timelines; None shows none.
        """
        event = self._run(work)
        if RECORDER.on and label is not None:
            if (queued := RECORDER.queued) is not None:
                queued.submitted(event)
            RECORDER.event(event, self._lane, *label, 0, self._index)
        return event

    def copy(
        self,
        destination: torch.Tensor,
        source: torch.Tensor,
        label: Label | None = COPY,
        *,
        direction: Direction | None = None,
    ) -> Event:
        """Copies bytes.  Both tensors stay alive until the event is done, and must not be written before.

        Args:
            destination, source: of one shape and dtype; contiguous ones are copied in chunks, others at once.
            label: as of `submit`.
            direction: if it does not follow from the stream and the tensors' allocators.

        Raises:
            ValueError: shapes or dtypes differ.
        """
        if destination.shape != source.shape or destination.dtype != source.dtype:
            raise ValueError(
                f"cannot copy {source.dtype} {tuple(source.shape)} to {destination.dtype} {tuple(destination.shape)}"
            )
        event = self._copy(destination, source, direction)
        if RECORDER.on and label is not None:
            RECORDER.event(event, self._lane, *label, source.nbytes, self._index)
        return event

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Makes later submissions start after `event` (of any stream or device); returns immediately."""

    @abstractmethod
    def record(self) -> Event:
        """An event that is done when all earlier submissions are."""

    def synchronize(self) -> None:
        """Waits for all earlier submissions; raises like `Event.wait`."""
        self.record().wait()

    @abstractmethod
    def recover(self) -> None:
        """Waits until nothing is in flight and clears the failure.  Raises EngineError if the device cannot recover."""

    @abstractmethod
    def close(self) -> None:
        """Ends the stream: work that has not started fails.  Waits for work that cannot be interrupted."""

    @abstractmethod
    def _run(self, work: Callable[[], object]) -> Event:
        """Runs `work` as `submit` says."""

    @abstractmethod
    def _copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction | None) -> Event:
        """Copies between tensors of one shape and dtype as `copy` says."""

    def _require_open(self) -> None:
        if self._closed:
            raise closed_error(self.name)


ROLES = ("compute", "h2d", "d2h", "small copies")
"""Of a device's streams."""
_LANES = {"compute": lanes.GPU, "h2d": lanes.H2D, "d2h": lanes.D2H, "small copies": lanes.SMALL_COPY}


def device_index(name: str) -> int:
    """A device's index among several, for timelines: the number at the end of its name."""
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits) if digits else 0


@dataclass(frozen=True)
class Device:
    """A compute device.

    Attributes:
        name: `cpu`, `cuda:0`, `emulated:slow-link#0`.
        torch_device: the torch device of its tensors: `cpu` for an emulated one.
        memory: its own memory.  host_memory: host memory with the fastest copies.
        streams: as `ROLES` says: for kernels; for expert weights and other large copies, one at a time each way; for
            activations, both directions, which never wait behind weights.
        copy_log: reports finished copies to listeners.
        compute_follows_caller: whether the caller's torch operators are queued on `compute_stream`, in order with
            submitted work. If not, they have finished when they return, and submitted work must be waited for.
        new_capture: starts capturing a graph; None if unsupported.
        meter: counts what work costs, if the device's time is modelled.
        watch: keeps the budget within what other programs leave; None if they use none of its memory.
        is_unified: whether its memory is the host's: there are no copies of experts, and no slots.
        identity: of the very card, its driver and its link, for what is measured and kept; empty if the name says it.
    """

    name: str
    torch_device: torch.device
    memory: MemoryBudget
    host_memory: HostMemory
    streams: tuple[Stream, ...]
    copy_log: CopyLog
    on_close: Callable[[], None] = lambda: None
    compute_follows_caller: bool = False
    new_capture: Callable[[], Capture] | None = None
    meter: Meter | None = None
    watch: MemoryWatch | None = None
    is_unified: bool = False
    identity: str = ""

    @cached_property
    def index(self) -> int:
        """Index among several devices, for timelines."""
        return device_index(self.name)

    @property
    def compute_stream(self) -> Stream:
        return self.streams[0]

    @property
    def h2d_stream(self) -> Stream:
        return self.streams[1]

    @property
    def d2h_stream(self) -> Stream:
        return self.streams[2]

    @property
    def small_copy_stream(self) -> Stream:
        return self.streams[3]

    def synchronize(self) -> None:
        """Waits for all work of all streams; raises the first failure."""
        for event in [stream.record() for stream in self.streams]:
            event.wait()

    def recover(self) -> None:
        """Calls `Stream.recover` of every stream: between a failed request and the next."""
        for stream in self.streams:
            stream.recover()

    def responds(self) -> bool:
        """Whether it still computes, once nothing is in flight; a card that has failed does not, for this process."""
        try:
            self.recover()
            return float(torch.ones(2, device=self.torch_device).sum()) == 2
        except (EngineError, RuntimeError):
            return False

    def close(self) -> None:
        """Ends all streams and their threads, and unpins memory.  Does not wait for copies; idempotent."""
        self.on_close()
        for stream in self.streams:
            stream.close()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
