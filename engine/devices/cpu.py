"""The CPU as a device: its memory is the host's, and work runs immediately on the submitting thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from engine.common import clock
from engine.common.errors import EngineError
from engine.devices.device import CopyLog, Device, Direction, Event, RecordedStream
from engine.devices.failures import as_engine_error, closed_error
from engine.devices.host_event import HostEvent
from engine.devices.host_memory import PageableMemory, allocate_host, available_ram
from engine.devices.memory_budget import MemoryBudget


class InlineStream(RecordedStream):
    """See `engine.devices.device.Stream`; every event is done when it is returned, and `wait` blocks."""

    def __init__(self, name: str, copy_log: CopyLog) -> None:
        super().__init__(name)
        self._copy_log = copy_log
        self._turn = threading.RLock()  # keeps the order among submitting threads
        self._failure: EngineError | None = None
        self._closed = False

    @property
    def failure(self) -> EngineError | None:
        return self._failure

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

    def synchronize(self) -> None:
        self.record().wait()

    def recover(self) -> None:
        with self._turn:
            self._require_open()
            self._failure = None

    def close(self) -> None:
        self._closed = True

    def _run(self, work: Callable[[], object], copied: tuple[Direction, int] | None = None) -> Event:
        with self._turn:
            self._require_open()
            event = HostEvent(self.name)
            event.claim()
            if self._failure is not None:
                event.fail(self._failure)
                return event
            started_s = clock.now()
            try:
                work()
            except Exception as error:
                self._failure = as_engine_error(error, self.name)
                event.fail(self._failure)
                return event
            ended_s = clock.now()
            if copied is not None:
                self._copy_log.ended(self.name, *copied, started_s, ended_s)
            event.finish(started_s, ended_s)
            return event

    def _require_open(self) -> None:
        if self._closed:
            raise closed_error(self.name)


def open_cpu(total: int | None = None) -> Device:
    """Opens the CPU.

    Args:
        total: memory budget in bytes; None: what is available now.
    """
    log = CopyLog()
    compute, h2d, d2h, small = (InlineStream(f"cpu {name}", log) for name in ("compute", "h2d", "d2h", "small copies"))

    def close() -> None:
        for stream in (compute, h2d, d2h, small):
            stream.close()

    return Device(
        name="cpu",
        torch_device=torch.device("cpu"),
        memory=MemoryBudget("cpu", available_ram() if total is None else total, allocate_host),
        host_memory=PageableMemory(),
        compute_stream=compute,
        h2d_stream=h2d,
        d2h_stream=d2h,
        small_copy_stream=small,
        copy_log=log,
        on_close=close,
    )
