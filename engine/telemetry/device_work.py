"""The recorder's interface to devices."""

from __future__ import annotations

from typing import Any, Protocol


class DeviceWork(Protocol):
    """The part of `engine.devices.device.Event` that the recorder reads."""

    def done(self) -> bool: ...
    @property
    def failure(self) -> Exception | None: ...
    @property
    def started_s(self) -> float: ...
    @property
    def ended_s(self) -> float: ...


class QueuedWork(Protocol):
    """Marks in the queues of devices, where the caller's thread only queues the dense work between experts.

    Places are torch devices.  A mark is None if none could be set.
    """

    def begin(self) -> None:
        """A forward starts."""

    def head(self, name: int, layer: int, count: int) -> None:
        """The forward has ended with this."""

    def forget(self) -> None:
        """No forward is running."""

    def experts_begin(self, place: Any) -> DeviceWork | None:
        """Experts without spans of their own start; returns the mark before them."""

    def routed(self, mark: DeviceWork | None, device: int) -> None:
        """At this mark of a device, the inputs of a layer's experts are ready."""

    def experts_done(self, begun: DeviceWork, place: Any, experts: int) -> None:
        """All of a layer's experts were queued on a device since this mark: records their span."""

    def submitted(self, work: DeviceWork) -> None:
        """The latest work submitted by experts."""

    def experts_end(self, place: Any) -> None:
        """Later work is not experts'."""
