"""Opens cards, and starts compiled kernels on NVIDIA's, through the driver and on PyTorch's streams."""

from __future__ import annotations

import ctypes
import logging
import sys
from functools import cache

import torch

from engine.kernels.cuda.card import Card
from engine.kernels.cuda.compiled import Kernel, machine_code
from engine.kernels.cuda.hip import AmdCard, find_hiprtc
from engine.kernels.cuda.launcher import CompilingLauncher, DriverError, Launcher
from engine.kernels.cuda.nvrtc import CompileError, find_nvrtc

__all__ = ["DriverError", "Launcher", "NvidiaCard", "card_of", "nvidia_card", "open_card"]

_log = logging.getLogger(__name__)


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = NvidiaCard._bound(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"))
    except OSError as error:
        raise DriverError(f"NVIDIA's driver could not be loaded ({error})") from None
    pointer = ctypes.c_void_p
    library.cuCtxSetCurrent.argtypes = [pointer]
    library.cuMemHostGetDevicePointer_v2.argtypes = [pointer, pointer, ctypes.c_uint]
    return library


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


class NvidiaCard(Card):
    """One of NVIDIA's; the version of its driver is that of CUDA that it knows."""

    _prefix, _launching, _telling = "cu", "cuLaunchKernel", "cuDriverGetVersion"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.capability = (self._properties.major, self._properties.minor)
        # PyTorch's own: a thread that has not called CUDA's runtime yet has none.
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._checked(_driver().cuInit(0), "start")
        self._checked(_driver().cuDeviceGet(ctypes.byref(device), index), "find the card")
        self._checked(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device), "open the card")

    def address_of(self, memory: torch.Tensor) -> int:
        found = ctypes.c_void_p()
        self._enter()
        done = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(found), memory.data_ptr(), 0)
        self._checked(done, "map the host's memory")
        return found.value or 0

    def _enter(self) -> None:
        self._checked(_driver().cuCtxSetCurrent(self._context), "use the card")

    def _library(self) -> ctypes.CDLL:
        return _driver()

    def _checked(self, result: int, did: str) -> None:
        if result:
            words = ctypes.c_char_p()
            _driver().cuGetErrorString(result, ctypes.byref(words))
            said = words.value.decode(errors="replace") if words.value else f"error {result}"
            raise DriverError(f"The card's driver could not {did}: {said}")

    def _code(self, kernel: Kernel, *, again: bool = False) -> bytes:
        return machine_code(kernel, self.capability, self.driver, again=again)
