"""When a device did what its callers only queue: attention, norms, routers, heads and captured graphs.

Where torch's operators return before they are done, as on a card, the host's clock knows nothing of them.  But all that
stands between two marks in the device's queue is known by its own clock, and most of the marks are there anyway: the
end of what a layer's experts submitted, and the moment at which the router's choice may be read.  Time in which the
queue is empty between the two, because the host is slower than the device, belongs to the span.  Of what is inside
nothing is known, least of all of a graph's inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.common.errors import EngineError
from engine.devices.device import Device, Event
from engine.telemetry.device_work import DeviceWork
from engine.telemetry.lanes import DENSE, EXPERTS, GPU
from engine.telemetry.recorder import Recorder


class Between:
    """What a queue did between the end of one of its works and the beginning of another, as `DeviceWork`."""

    __slots__ = ("_after", "_until")

    def __init__(self, after: DeviceWork, until: DeviceWork) -> None:
        self._after, self._until = after, until

    def done(self) -> bool:
        """Whether both are known; never blocks."""
        return self._until.done() and self._after.done()

    @property
    def failure(self) -> Exception | None:
        """Of either."""
        return self._after.failure or self._until.failure

    @property
    def started_s(self) -> float:
        """When the first ended, in seconds of `time.perf_counter`."""
        return self._after.ended_s

    @property
    def ended_s(self) -> float:
        """When the second began."""
        return max(self._after.ended_s, self._until.started_s)


class QueuedDense:
    """See `engine.telemetry.device_work.QueuedWork`.  For the thread of the engine; never waits for a device.

    Args:
        devices: whose compute streams the caller's operators are queued on, in the order of the model's layers.
    """

    def __init__(self, devices: Sequence[Device], recorder: Recorder) -> None:
        self._recorder = recorder
        self._devices = {device.torch_device: device for device in reversed(devices)}
        self._first = devices[0]
        self._in_forward = False
        self._since: DeviceWork | None = None
        self._ended: DeviceWork | None = None

    def begin(self) -> None:
        """See `QueuedWork.begin`."""
        self._in_forward, self._ended = True, None
        self._since = self._mark(self._first)

    def head(self, name: int, layer: int, count: int) -> None:
        """See `QueuedWork.head`."""
        if self._since is not None:
            self._add(self._mark(self._first), name, layer, count, self._first.index)
        self.forget()

    def forget(self) -> None:
        """See `QueuedWork.forget`."""
        self._in_forward, self._since, self._ended = False, None, None

    def experts_begin(self, place: torch.device) -> DeviceWork | None:
        """See `QueuedWork.experts_begin`."""
        device = self._devices.get(place, self._first)
        mark = self._mark(device)
        self.routed(mark, device.index)
        return mark

    def routed(self, mark: DeviceWork | None, device: int) -> None:
        """See `QueuedWork.routed`."""
        if self._since is not None:
            self._add(mark, *self._recorder.named(DENSE, self._recorder.layer), device)

    def experts_done(self, begun: DeviceWork, place: torch.device, experts: int) -> None:
        """See `QueuedWork.experts_done`."""
        device = self._devices.get(place, self._first)
        end = self._ended = self._mark(device)
        if end is not None:
            self._recorder.event(Between(begun, end), GPU, EXPERTS, count=experts, device=device.index)

    def submitted(self, work: DeviceWork) -> None:
        """See `QueuedWork.submitted`."""
        self._ended = work

    def experts_end(self, place: torch.device) -> None:
        """See `QueuedWork.experts_end`."""
        ended, self._ended = self._ended, None
        if self._in_forward:
            self._since = ended or self._mark(self._devices.get(place, self._first))

    def _add(self, until: DeviceWork | None, name: int, layer: int, count: int, device: int) -> None:
        since, self._since = self._since, None
        if since is not None and until is not None:
            self._recorder.event(Between(since, until), GPU, name, layer, count=count, device=device)

    def _mark(self, device: Device) -> Event | None:
        try:
            return device.compute_stream.record()
        except EngineError:  # it has been closed: the computation raises its own error
            return None
