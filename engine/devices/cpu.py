"""The CPU as a device: its memory is the host's, and work runs immediately on the submitting thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.common import clock
from engine.common.errors import EngineError
from engine.devices.device import ROLES, CopyLog, Device, Direction, Event, Stream
from engine.devices.failures import as_engine_error, fresh
from engine.devices.host_memory import HostMemory, allocate_host, available_ram
from engine.devices.memory_budget import MemoryBudget


@dataclass(frozen=True, slots=True)
class EndedEvent:
    """See `engine.devices.device.Event`: the work has ended."""

    started_s: float
    ended_s: float
    failure: EngineError | None = None

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002
        if self.failure is not None:
            raise fresh(self.failure)
        return True


class InlineStream(Stream):
    """See `engine.devices.device.Stream`; every event is done when it is returned, and `wait` blocks."""

    def __init__(self, name: str, copy_log: CopyLog) -> None:
        super().__init__(name, copy_log)
        self._turn = threading.RLock()  # keeps the order among submitting threads

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Direction | None) -> Event:

        def move() -> None:
            with torch.inference_mode():
                destination.copy_(source)

        return self._run(move, (direction or Direction.D2D, source.nbytes))

    def wait(self, event: Event) -> None:
        with self._turn:
            self._require_open()
            if self._failure is None:
                try:
                    event.wait()
                except EngineError as error:
                    self._failure = error

    def record(self) -> Event:
        return self._run(lambda: None)

    def recover(self) -> None:
        with self._turn:
            self._require_open()
            self._failure = None

    def close(self) -> None:
        self._closed = True

    def _run(self, work: Callable[[], object], copied: tuple[Direction, int] | None = None) -> Event:
        with self._turn:
            self._require_open()
            started_s = clock.now()
            if self._failure is None:
                try:
                    work()
                except Exception as error:
                    self._failure = as_engine_error(error, self.name)
            ended_s = clock.now()
            if self._failure is None and copied is not None:
                self._copy_log.ended(self.name, *copied, started_s, ended_s)
            return EndedEvent(started_s, ended_s, self._failure)


def open_cpu(total: int | None = None) -> Device:
    """Opens the CPU with a memory budget in bytes; None: what is available now."""
    log = CopyLog()
    return Device(
        name="cpu",
        torch_device=torch.device("cpu"),
        memory=MemoryBudget("cpu", available_ram() if total is None else total, allocate_host),
        host_memory=HostMemory(),
        streams=tuple(InlineStream(f"cpu {role}", log) for role in ROLES),
        copy_log=log,
    )
