"""What the recorder wants to know of devices, which it knows nothing else of."""

from __future__ import annotations

from typing import Any, Protocol


class DeviceWork(Protocol):
    """What the recorder reads of `engine.devices.device.Event`."""

    def done(self) -> bool: ...
    @property
    def failure(self) -> Exception | None: ...
    @property
    def started_s(self) -> float: ...
    @property
    def ended_s(self) -> float: ...


class QueuedWork(Protocol):
    """Marks in the queues of devices, where the caller's thread only queues what is between experts.

    Places are torch's devices.  A mark is None where there could be none.
    """

    def begin(self) -> None:
        """A forward begins."""

    def head(self, name: int, layer: int, count: int) -> None:
        """The forward has ended with this."""

    def forget(self) -> None:
        """There is no forward under way."""

    def experts_begin(self, place: Any) -> DeviceWork | None:
        """Experts begin that do not tell by themselves; the mark before them."""

    def routed(self, mark: DeviceWork | None, device: int) -> None:
        """At this mark of a device all is done that the experts of a layer are given."""

    def experts_done(self, begun: DeviceWork, place: Any, experts: int) -> None:
        """A device has been given all of a layer's experts since this mark: they have a span of their own."""

    def submitted(self, work: DeviceWork) -> None:
        """The last that experts have submitted so far."""

    def experts_end(self, place: Any) -> None:
        """What is queued from now on is not experts."""
