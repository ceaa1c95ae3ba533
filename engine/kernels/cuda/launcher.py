"""What runs compiled kernels: a card of one maker or another, or what stands for one in tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from engine.kernels.cuda.compiled import Kernel


class Launcher(Protocol):
    """Something that runs kernels."""

    @property
    def multiprocessors(self) -> int: ...
    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        """Queues a kernel on the current stream."""


class SharingLauncher(Launcher, Protocol):
    """A card whose kernels read and write memory of the host while they run."""

    def address_of(self, memory: torch.Tensor) -> int:
        """Where the card has pinned and mapped memory of the host.

        Raises:
            DriverError: nowhere.
        """


class CompilingLauncher(Launcher, Protocol):
    """A card, whose kernels are compiled when they are first needed."""

    def __hash__(self) -> int: ...
    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compiles kernels at the same time, so that nobody waits for them one by one."""


class DriverError(Exception):
    """A driver refused something; the message is one sentence."""
