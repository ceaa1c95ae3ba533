"""Tensors from one card to another: directly, or through the host, whichever was measured to be sooner here."""

from __future__ import annotations

import logging

import torch

from engine.common import clock
from engine.devices.device import Device, Direction, Event
from engine.devices.memory_budget import MemoryCategory
from engine.telemetry import lanes

_log = logging.getLogger(__name__)

TRIED_BYTES = (2**14, 2**20)
"""Of a token's row, and of a short prompt's."""
_TRIES = 3
_LABEL = (lanes.HIDDEN, None, -1, 1)


class Between:
    """The way from one card to another, with a buffer there that every call reuses.  Not thread-safe.

    Attributes:
        direct_s, hosted_s: what `TRIED_BYTES` take each way, in all; 0 before `measure`.
    """

    def __init__(self, source: Device, target: Device) -> None:
        self.source, self.target = source, target
        self.direct_s = self.hosted_s = 0.0
        self._there: torch.Tensor | None = None
        self._host: torch.Tensor | None = None
        self._read: Event | None = None

    @property
    def is_direct(self) -> bool:
        """Whether what is not on the host yet goes directly."""
        return self.direct_s <= self.hosted_s

    def measure(self) -> None:
        """Times both ways.

        Raises:
            EngineError: a device failed, or has no memory for it.
        """
        direct_s = hosted_s = 0.0
        for nbytes in TRIED_BYTES:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self.source.torch_device)
            direct_s += min(self._timed(tensor, is_direct=True) for _ in range(_TRIES))
            hosted_s += min(self._timed(tensor, is_direct=False) for _ in range(_TRIES))
        self.direct_s, self.hosted_s = direct_s, hosted_s
        way = "directly" if self.is_direct else "through the host"
        _log.info(
            "rows go from %s to %s %s: %.0f us against %.0f",
            *(self.source.name, self.target.name, way, 1e6 * min(direct_s, hosted_s), 1e6 * max(direct_s, hosted_s)),
        )

    def carry(self, tensor: torch.Tensor, *, landed: torch.Tensor | None = None) -> tuple[torch.Tensor, Event]:
        """The tensor on the target, and the event of its arrival.  It is valid until the next call.

        Args:
            tensor: contiguous, as the source's compute stream leaves it.
            landed: the same on the host, if it is there already and stays until the copy has ended.

        Raises:
            EngineError: a device failed, or has no memory for it.
        """
        return self._carry(tensor, landed, is_direct=landed is None and self.is_direct)

    def read_until(self, event: Event) -> None:
        """The last result of `carry` may be read until this event."""
        self._read = event

    def forget(self) -> None:
        """After a failure: nothing is in flight any more."""
        self._read = None

    def close(self) -> None:
        """Frees the buffers, which must no longer be in use.  Idempotent."""
        if self._there is not None:
            self.target.memory.release(self._there)
        if self._host is not None:
            self.source.host_memory.release(self._host)
        self._there = self._host = None

    def _carry(
        self, tensor: torch.Tensor, landed: torch.Tensor | None, *, is_direct: bool
    ) -> tuple[torch.Tensor, Event]:
        source, target = self.source.small_copy_stream, self.target.small_copy_stream
        there = self._room(tensor)
        if self._read is not None:
            target.wait(self._read)
            self._read = None
        if landed is not None:
            return there, target.copy(there, landed, _LABEL, direction=Direction.H2D)
        if self.source.compute_follows_caller:
            computed = self.source.compute_stream.record()
            (target if is_direct else source).wait(computed)
        if is_direct:
            return there, target.copy(there, tensor, _LABEL, direction=Direction.P2P)
        assert self._host is not None
        host = self._host[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        target.wait(source.copy(host, tensor, _LABEL, direction=Direction.D2H))
        return there, target.copy(there, host, _LABEL, direction=Direction.H2D)

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        needed = tensor.nbytes
        if self._there is None or self._host is None or self._there.nbytes < needed:
            self.target.small_copy_stream.synchronize()
            if self._read is not None:
                self._read.wait()
            self.close()
            roomy = 1 << max(12, (needed - 1).bit_length())
            self._there = self.target.memory.allocate(roomy, MemoryCategory.ACTIVATIONS)
            self._host = self.source.host_memory.allocate(roomy)
        return self._there[:needed].view(tensor.dtype).view(tensor.shape)

    def _timed(self, tensor: torch.Tensor, *, is_direct: bool) -> float:
        begun_s = clock.now()
        self._carry(tensor, None, is_direct=is_direct)[1].wait()
        return clock.now() - begun_s
