"""Page-aligned memory of the host."""

from __future__ import annotations

import ctypes
import sys
from typing import Protocol

import torch

from engine.hardware.surroundings import available_ram as available_ram

PAGE = 4096
"""Alignment in bytes of all allocations, so that they can be pinned and read from disk directly."""

_WORTH_ASKING = 4 * 2**20
"""Allocations of this size are asked to be in pages of 2 MiB."""
_MADV_HUGEPAGE = 14
_WORTH_A_LOOK = 64 * 2**20
"""Allocations of this size check free RAM first: the system overcommits."""


class HostMemory(Protocol):
    """Allocator of staging buffers and banks: pinned as far as possible, otherwise pageable."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes currently pinned."""

    def expect(self, nbytes: int) -> None:
        """Announces future allocations: measuring the pinning limit takes seconds."""

    def allocate(self, nbytes: int, *, unit: int | None = None) -> torch.Tensor:
        """Page-aligned bytes [nbytes] on the CPU, not initialised, pinned as far as possible.

        Args:
            unit: bytes copied at a time: no copy may cross a multiple of it.  None: all at once.

        Raises:
            MemoryError: not enough free memory.
        """

    def share(self, nbytes: int) -> torch.Tensor:
        """As `allocate`, for little: what the device's kernels read and write themselves while they run.

        Raises:
            MemoryError: not enough free memory, or the driver does not pin it.
        """

    def release(self, memory: torch.Tensor) -> None:
        """Unpins memory from `allocate` or `share`; it is freed with the last tensor that uses it."""

    def close(self) -> None:
        """Unpins everything."""


class PageableMemory:
    """Pageable memory, for devices without pinning."""

    pinned_bytes = 0

    def expect(self, nbytes: int) -> None:
        """See `HostMemory.expect`."""

    def allocate(self, nbytes: int, *, unit: int | None = None) -> torch.Tensor:  # noqa: ARG002
        return allocate_host(nbytes)

    def share(self, nbytes: int) -> torch.Tensor:
        return allocate_host(nbytes)

    def release(self, memory: torch.Tensor) -> None:
        """See `HostMemory.release`."""

    def close(self) -> None:
        """See `HostMemory.close`."""


def allocate_host(nbytes: int) -> torch.Tensor:
    """Page-aligned bytes [nbytes] on the CPU, not initialised, in huge pages where it is large enough for them.

    Raises:
        MemoryError: not enough free memory.
    """
    if nbytes >= _WORTH_A_LOOK and nbytes > (free := available_ram()):
        raise MemoryError(f"{nbytes:,} bytes requested, but only {free:,} are free")
    memory = aligned(nbytes, torch.device("cpu"))
    if nbytes >= _WORTH_ASKING and sys.platform == "linux":
        # Processors end what they fetch ahead at each page's end; where the system refuses, pages stay small.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)
    return memory


def aligned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Page-aligned bytes [nbytes] from torch's allocator."""
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % PAGE
    return raw[skip : skip + nbytes]
