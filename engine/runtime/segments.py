"""Steps over several devices as graphs: one graph for each run of layers on a device, copies between them.

A graph is one device's.  Where hidden states, angles and masks travel to another one, the graph under way ends, they
are copied to tensors that stay there, and with these the next graph begins on that device.  The copies are torch's own:
they go from card to card where the system lets them, else through the host, and the streams of both wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from engine.devices.device import Capture, Device, Graph
from engine.devices.memory_budget import MemoryCategory
from engine.runtime.decoder_layers import carry_by


class _Crossing:
    """Copies from tensors of one device to those of another, all of which stay."""

    def __init__(self, sources: Sequence[torch.Tensor], place: torch.device) -> None:
        self._sources = sources
        self.targets = [torch.empty_like(source, device=place) for source in sources]

    def replay(self) -> None:
        for source, target in zip(self._sources, self.targets, strict=True):
            target.copy_(source, non_blocking=True)


class _Segments:
    """See `engine.devices.device.Graph`."""

    def __init__(self, parts: Sequence[Graph]) -> None:
        self.parts = parts

    def replay(self) -> None:
        for part in self.parts:
            part.replay()


class SegmentedCapture:
    """See `engine.devices.device.Capture`; of several devices, which have layers one after the other.

    Args:
        devices: all of which capture; a step begins and ends on the first.

    Attributes:
        crossings: copies between devices in what was captured so far.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._places = [device.torch_device for device in devices]
        self._captures: list[Capture] = []
        for device in devices:
            assert device.new_capture is not None
            self._captures.append(device.new_capture())
        self._others = [device.memory.reserve(0, MemoryCategory.ACTIVATIONS) for device in devices[1:]]
        self._at = self.crossings = 0
        self._parts: list[Graph] = []

    @property
    def nbytes(self) -> int:
        """Of the first device.  What the others hold is counted here."""
        return self._captures[0].nbytes

    def begin(self) -> None:
        self._parts = []
        carry_by(self._cross)
        self._captures[self._at].begin()

    def end(self) -> Graph:
        """See `Capture.end`.

        Raises:
            DeviceMemoryError: a device has no room for what was captured.
        """
        carry_by(None)
        self._parts.append(self._captures[self._at].end())
        for reservation, capture in zip(self._others, self._captures[1:], strict=True):
            reservation.resize(capture.nbytes)
        made, self._parts = _Segments(self._parts), []
        return made

    def abandon(self) -> None:
        carry_by(None)
        for capture in self._captures:
            capture.abandon()

    def close(self) -> None:
        carry_by(None)
        self._parts = []
        with ExitStack() as closing:
            for reservation in self._others:
                closing.callback(reservation.release)
            for capture in self._captures:
                closing.callback(capture.close)

    def _cross(self, tensors: Sequence[torch.Tensor], index: int) -> Sequence[torch.Tensor]:
        self._parts.append(self._captures[self._at].end())
        crossing = _Crossing(tensors, self._places[index])
        crossing.replay()
        self._parts.append(crossing)
        self.crossings += 1
        self._at = index
        self._captures[index].begin()
        return crossing.targets
