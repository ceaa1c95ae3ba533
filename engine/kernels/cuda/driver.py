"""Opens cards, and starts compiled kernels on NVIDIA's, through the driver and on PyTorch's streams."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from engine.kernels.cuda.compiled import Kernel, machine_code
from engine.kernels.cuda.hip import AmdCard, find_hiprtc
from engine.kernels.cuda.launcher import CompilingLauncher, DriverError, Launcher
from engine.kernels.cuda.nvrtc import CompileError, find_nvrtc

__all__ = ["DriverError", "Launcher", "NvidiaCard", "card_of", "nvidia_card", "open_card"]

_log = logging.getLogger(__name__)


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise DriverError(f"NVIDIA's driver could not be loaded ({error})") from None
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    library.cuCtxSetCurrent.argtypes = [pointer]
    library.cuMemHostGetDevicePointer_v2.argtypes = [pointer, pointer, number]
    return library


def _checked(result: int, did: str) -> None:
    if result:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(words))
        said = words.value.decode(errors="replace") if words.value else f"error {result}"
        raise DriverError(f"The card's driver could not {did}: {said}")


def card_of(device: torch.device) -> CompilingLauncher | None:
    """The card that is this device, whoever made it, where kernels can be compiled for it."""
    if device.type != "cuda":
        return None
    return _card(device.index if device.index is not None else torch.cuda.current_device())


def nvidia_card(device: torch.device) -> NvidiaCard | None:
    """The same, if NVIDIA made it: for kernels that wait for what the host writes."""
    card = card_of(device)
    return card if isinstance(card, NvidiaCard) else None


@cache
def _card(index: int) -> CompilingLauncher | None:
    try:
        return open_card(index)
    except (CompileError, DriverError) as error:
        _log.info("card %d runs no kernels in CUDA C: %s", index, error)
        return None


def open_card(index: int) -> CompilingLauncher:
    """The card of this index among torch's: AMD's cards have the names of NVIDIA's there.

    Raises:
        CompileError: there is no compiler for it.
        DriverError: its driver does not open it.
    """
    if torch.version.hip is not None:
        find_hiprtc()
        return AmdCard(index)
    find_nvrtc(torch.cuda.get_device_capability(index))
    return NvidiaCard(index)


class NvidiaCard:
    """One card; kernels are compiled and loaded when they are first needed.

    Attributes:
        driver: version of CUDA that the driver knows.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._functions: dict[Kernel, ctypes.c_void_p] = {}
        self._modules: list[ctypes.c_void_p] = []  # what functions are part of
        version = ctypes.c_int()
        _checked(_driver().cuDriverGetVersion(ctypes.byref(version)), "tell its version")
        self.driver = str(version.value)
        properties = torch.cuda.get_device_properties(self._device)
        self.capability = (properties.major, properties.minor)
        self._multiprocessors = int(properties.multi_processor_count)
        # PyTorch's own: a thread that has not called CUDA's runtime yet has none.
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        _checked(_driver().cuInit(0), "start")
        _checked(_driver().cuDeviceGet(ctypes.byref(device), index), "find the card")
        _checked(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device), "open the card")

    @property
    def multiprocessors(self) -> int:
        """Units that run blocks of threads."""
        return self._multiprocessors

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compiles kernels at the same time, so that nobody waits for them one by one.

        Raises:
            CompileError: one cannot be compiled.
        """
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda kernel: machine_code(kernel, self.capability, self.driver), kernels))

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        """Queues a kernel on PyTorch's current stream of this card.

        Raises:
            CompileError, DriverError: it cannot be compiled, loaded or started.
        """
        with torch.cuda.device(self._device):
            _checked(_driver().cuCtxSetCurrent(self._context), "use the card")
            function = self._functions.get(kernel) or self._load(kernel)
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
            stream = torch.cuda.current_stream(self._device).cuda_stream
            started = _driver().cuLaunchKernel(function, *grid, kernel.threads, 1, 1, 0, stream, parameters, None)
        _checked(started, f"start {kernel.name}")

    def address_of(self, memory: torch.Tensor) -> int:
        """See `SharingLauncher.address_of`."""
        found = ctypes.c_void_p()
        _checked(_driver().cuCtxSetCurrent(self._context), "use the card")
        done = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(found), memory.data_ptr(), 0)
        _checked(done, "map the host's memory")
        return found.value or 0

    def _load(self, kernel: Kernel) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        code = machine_code(kernel, self.capability, self.driver)
        if _driver().cuModuleLoadData(ctypes.byref(module), code):  # it was kept by another driver, perhaps
            code = machine_code(kernel, self.capability, self.driver, again=True)
            _checked(_driver().cuModuleLoadData(ctypes.byref(module), code), f"load {kernel.name}")
        self._modules.append(module)
        found = _driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.entry.encode())
        _checked(found, f"find {kernel.entry}")
        self._functions[kernel] = function
        return function
