"""What every device offers: streams that run work in order, events that say when it has ended, memory with a budget.

The rules are CUDA's.  Work of one stream runs in the order of submission; streams run beside each other unless one
waits for an event of another.  Nothing is known about work until its event is done.  An error in submitted work
surfaces where somebody waits, and the stream does nothing more until `recover`: what was queued behind the failure
would compute on what is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from types import TracebackType
from typing import Protocol

import torch

from engine.common.errors import EngineError
from engine.devices.copy_log import CopyLog
from engine.devices.graphs import Capture
from engine.devices.host_memory import HostMemory
from engine.devices.memory_budget import MemoryBudget


class Direction(StrEnum):
    """Which way a copy goes: over the link to the device, back, or not over the link at all."""

    H2D = "h2d"
    D2H = "d2h"
    D2D = "d2d"


class Event(Protocol):
    """The end of one piece of work.  Every method may be called from any thread."""

    def done(self) -> bool:
        """Whether the work has ended, well or not; never blocks."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the work has ended.  False if that took longer than `timeout_s`.

        Raises:
            EngineError: the work failed, something before it in its stream did, it was cancelled, or the device closed.
        """

    def cancel(self) -> bool:
        """Takes the work back if it has not begun; True if it never will.  (What CUDA has, it does not give back.)

        Work queued behind it in the same stream runs; a stream that waits for the event fails.
        """

    @property
    def failure(self) -> EngineError | None:
        """What `wait` would raise, or None while the work is under way or if it ended well."""

    @property
    def started_s(self) -> float:
        """When the work began, on `time.perf_counter`'s clock.  RuntimeError unless done."""

    @property
    def ended_s(self) -> float:
        """When the work ended, on `time.perf_counter`'s clock.  RuntimeError unless done."""


class Stream(Protocol):
    """A queue of work that one device does in order.  Every method may be called from any thread.

    Everything but `close` raises `EngineError` once the stream is closed.
    """

    @property
    def name(self) -> str:
        """`DEVICE NAME`, for messages and lanes of a timeline."""

    @property
    def failure(self) -> EngineError | None:
        """The first failure since the last `recover`: later work is not run and fails with it too."""

    def submit(self, work: Callable[[], object]) -> Event:
        """Runs `work` when everything before it has ended; what it returns is dropped, what it raises goes to waiters.

        `work` must not wait for later work of its own stream.
        """

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, direction: Direction | None = None) -> Event:
        """Copies bytes.  Both tensors stay alive until the event is done, and must not be written before.

        Args:
            destination, source: of one shape and dtype; contiguous ones are copied in pieces, others in one.
            direction: where it cannot be told from the stream and from who allocated the tensors.

        Raises:
            ValueError: shapes or dtypes differ.
        """

    def wait(self, event: Event) -> None:
        """Lets what is submitted from now on begin only after `event` (of any stream or device); returns at once."""

    def record(self) -> Event:
        """An event that is done when everything submitted so far is."""

    def synchronize(self) -> None:
        """Waits for everything submitted so far; raises as `Event.wait` does."""

    def recover(self) -> None:
        """Waits until nothing is in flight and forgets a failure.  Raises EngineError if the device is past help."""

    def close(self) -> None:
        """Ends the stream: what has not begun fails, its waiters are told.  Waits for what cannot be interrupted."""


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: `cpu`, `cuda:0`, `emulated:slow-link#0`.
        torch_device: where its tensors live: `cpu` for an emulated one.
        memory: its own memory.  host_memory: memory of the host that copies are quickest from.
        compute_stream: kernels.  h2d_stream, d2h_stream: expert weights and other big copies, one at a time each way.
        small_copy_stream: activations, either way: they never wait behind weights.
        copy_log: tells its listeners of every copy that has ended.
        compute_follows_caller: whether the caller's own torch operators are queued on `compute_stream`, in order with
            what is submitted to it.  If not, they have ended when they return, and submitted work is to be waited for.
        new_capture: begins to capture work that is to be repeated; None where that is not possible.
    """

    name: str
    torch_device: torch.device
    memory: MemoryBudget
    host_memory: HostMemory
    compute_stream: Stream
    h2d_stream: Stream
    d2h_stream: Stream
    small_copy_stream: Stream
    copy_log: CopyLog
    on_close: Callable[[], None]
    compute_follows_caller: bool = False
    new_capture: Callable[[], Capture] | None = None

    @cached_property
    def index(self) -> int:
        """Which of several, for a timeline: the number that its name ends in."""
        digits = self.name[len(self.name.rstrip("0123456789")) :]
        return int(digits) if digits else 0

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All four streams."""
        return self.compute_stream, self.h2d_stream, self.d2h_stream, self.small_copy_stream

    def synchronize(self) -> None:
        """Waits for everything that was submitted to any stream; raises the first failure."""
        for event in [stream.record() for stream in self.streams]:
            event.wait()

    def recover(self) -> None:
        """`Stream.recover` of every stream: after a failed request, before the next."""
        for stream in self.streams:
            stream.recover()

    def close(self) -> None:
        """Ends all streams and their threads, and frees what is pinned.  Does not wait for copies; idempotent."""
        self.on_close()

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Raises ValueError unless the two have one shape and one dtype."""
    if destination.shape != source.shape or destination.dtype != source.dtype:
        raise ValueError(
            f"cannot copy {source.dtype} {tuple(source.shape)} to {destination.dtype} {tuple(destination.shape)}"
        )
