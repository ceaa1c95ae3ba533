"""What cards of all makers have in common: kernels are compiled and loaded when they are first needed, and started.

Their drivers have the same functions under other names.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import torch

from engine.kernels.cuda.compiled import Kernel


class Card(ABC):
    """One of PyTorch's cards.

    Attributes:
        driver: its version.
    """

    _prefix: ClassVar[str]
    """Of the driver's functions that load kernels."""
    _launching: ClassVar[str]
    """The driver's function that starts them."""
    _telling: ClassVar[str]
    """The one that tells its version."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._functions: dict[Kernel, ctypes.c_void_p] = {}
        self._modules: list[ctypes.c_void_p] = []  # what functions are part of
        version = ctypes.c_int()
        self._checked(getattr(self._library(), self._telling)(ctypes.byref(version)), "tell its version")
        self.driver = str(version.value)
        self._properties = torch.cuda.get_device_properties(self._device)

    @classmethod
    def _bound(cls, library: ctypes.CDLL) -> ctypes.CDLL:
        """A driver whose functions know what they are given."""
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        getattr(library, cls._launching).argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        getattr(library, f"{cls._prefix}ModuleGetFunction").argtypes = [pointer, pointer, ctypes.c_char_p]
        return library

    @property
    def multiprocessors(self) -> int:
        """Units that run blocks of threads."""
        return int(self._properties.multi_processor_count)

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compiles kernels at the same time, so that nobody waits for them one by one.

        Raises:
            CompileError: one cannot be compiled.
        """
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(self._code, kernels))

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        """Queues a kernel on PyTorch's current stream of this card.

        Raises:
            CompileError, DriverError: it cannot be compiled, loaded or started.
        """
        with torch.cuda.device(self._device):
            self._enter()
            function = self._functions.get(kernel) or self._load(kernel)
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            stream = torch.cuda.current_stream(self._device).cuda_stream
            start = getattr(self._library(), self._launching)
            started = start(function, *grid, kernel.threads, 1, 1, 0, stream, parameters, None)
        self._checked(started, f"start {kernel.name}")

    def _load(self, kernel: Kernel) -> ctypes.c_void_p:
        library, module, function = self._library(), ctypes.c_void_p(), ctypes.c_void_p()
        load = getattr(library, f"{self._prefix}ModuleLoadData")
        if load(ctypes.byref(module), self._code(kernel)):  # it was kept by another driver, perhaps
            self._checked(load(ctypes.byref(module), self._code(kernel, again=True)), f"load {kernel.name}")
        self._modules.append(module)
        find = getattr(library, f"{self._prefix}ModuleGetFunction")
        self._checked(find(ctypes.byref(function), module, kernel.entry.encode()), f"find {kernel.entry}")
        self._functions[kernel] = function
        return function

    def _enter(self) -> None:  # noqa: B027  AMD's driver asks for nothing
        """Makes this card the calling thread's, as far as the driver wants to be told."""

    @abstractmethod
    def _library(self) -> ctypes.CDLL:
        """The driver.  Raises `DriverError` where there is none."""

    @abstractmethod
    def _checked(self, result: int, did: str) -> None:
        """Raises `DriverError` if the driver could not do something."""

    @abstractmethod
    def _code(self, kernel: Kernel, *, again: bool = False) -> bytes:
        """Machine code for this card; `again`: the driver has refused what was kept."""
