"""Page-aligned memory of the host."""

from __future__ import annotations

from typing import Protocol

import psutil
import torch

from engine.hardware.cgroup import memory_limits

PAGE = 4096
"""Bytes: alignment of everything that devices allocate, so that it can be read from disk directly and pinned."""

_WORTH_A_LOOK = 64 * 2**20
"""Bytes from which on the operating system is asked first: it promises memory that it does not have."""


class HostMemory(Protocol):
    """Where staging buffers and banks come from: pinned as far as that goes, else ordinary memory."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""

    def expect(self, nbytes: int) -> None:
        """Says that so much is going to be allocated, before it is: finding out what can be pinned takes seconds."""

    def allocate(self, nbytes: int, *, unit: int | None = None) -> torch.Tensor:
        """Page-aligned bytes [nbytes] on the CPU, not initialised, pinned as far as possible.

        Args:
            unit: what is copied at a time: no copy may cross a multiple of it.  None: all at once.

        Raises:
            MemoryError: the host has not so much.
        """

    def release(self, memory: torch.Tensor) -> None:
        """Unpins what `allocate` gave; it is freed when the last tensor that uses it is."""


class PageableMemory:
    """Ordinary memory, for devices that know no pinning."""

    pinned_bytes = 0

    def expect(self, nbytes: int) -> None:
        """See `HostMemory.expect`."""

    def allocate(self, nbytes: int, *, unit: int | None = None) -> torch.Tensor:  # noqa: ARG002
        """See `HostMemory.allocate`."""
        return allocate_host(nbytes)

    def release(self, memory: torch.Tensor) -> None:
        """See `HostMemory.release`."""


def allocate_host(nbytes: int) -> torch.Tensor:
    """Page-aligned bytes [nbytes] on the CPU, not initialised.

    Raises:
        MemoryError: the host has not so much.
    """
    if nbytes >= _WORTH_A_LOOK and nbytes > (free := available_ram()):
        raise MemoryError(f"{nbytes:,} bytes are more than the {free:,} that are free")
    return aligned(nbytes, torch.device("cpu"))


def aligned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Page-aligned bytes [nbytes] from torch's own allocator."""
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % PAGE
    return raw[skip : skip + nbytes]


def available_ram() -> int:
    """Bytes of RAM that may be allocated now: what the machine and its control groups leave."""
    free = int(psutil.virtual_memory().available)
    _, left = memory_limits()
    return free if left is None else min(free, left)
