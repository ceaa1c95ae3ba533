"""NVIDIA's management library (NVML), with timeouts and with errors turned into sentences.

A driver that is being updated responds with a version different from its library's; a card that has fallen off the bus
disappears midway; a broken driver may not respond at all. All of these become a message.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pynvml

from engine.hardware.gpu_info import GpuInfo, Vendor
from engine.hardware.surroundings import BoundedCalls

T = TypeVar("T")

_TIMEOUT_S = 5.0
_WSL_LIBRARY = Path("/usr/lib/wsl/lib/libnvidia-ml.so.1")
_REASONS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "No NVIDIA driver was found.",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "The NVIDIA driver is installed but not loaded: restart the computer.",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "The NVIDIA driver was updated and no longer matches the loaded one: restart the computer."
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "The NVIDIA driver denies this user access: check access to /dev/nvidia*.",
    pynvml.NVML_ERROR_GPU_IS_LOST: "An NVIDIA card has fallen off the bus: restart the computer.",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "The NVIDIA driver is too old: update it.",
}
_HANGS = "The NVIDIA driver does not respond: restart the computer, or update the driver."
_NO_CARDS = "The NVIDIA driver lists no graphics card."
_SESSION_LOST = frozenset(
    (
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_UNKNOWN,
    )
)
"""Errors after which the library is reopened: the driver may have been reloaded."""


class NvmlUnavailableError(Exception):
    """The message says in one sentence why there is nothing to read."""


class NvmlCard:
    """A card inside a `look`: `read` returns a value, or None if the driver has none."""

    def __init__(self, library: Any, handle: Any, index: int) -> None:
        self.index = index
        self._library = library
        self._handle = handle
        self.lost = False

    def read(self, function: str, *arguments: Any) -> Any:
        """`function(handle, *arguments)` of the library, or None."""
        try:
            return getattr(self._library, function)(self._handle, *arguments)
        except self._library.NVMLError as error:
            self.lost |= error.value in _SESSION_LOST
        except (AttributeError, OSError, ValueError, UnicodeDecodeError):
            pass  # a driver older than the binding, or one that returns invalid text
        return None


class Nvml:
    """The library, opened on first use and reopened after it was lost."""

    def __init__(self, library: Any = pynvml) -> None:
        self._library = library
        self._bounded = BoundedCalls("nvml")
        self._is_open = False

    def look(self, at: Callable[[NvmlCard], T], *, timeout_s: float = _TIMEOUT_S) -> list[T]:
        """`at` applied to every visible card, in driver order.

        Raises:
            NvmlUnavailableError: there is none, or the driver does not work or respond.
        """
        try:
            found = self._bounded(lambda: self._look(at), timeout_s)
        except TimeoutError:
            raise NvmlUnavailableError(_HANGS) from None
        except self._library.NVMLError as error:
            raise NvmlUnavailableError(_reason(error)) from None
        except (OSError, AttributeError) as error:  # a file of that name that is not the library
            raise NvmlUnavailableError(f"The NVIDIA driver's library cannot be used: {_first_line(error)}.") from None
        if not found:
            raise NvmlUnavailableError(_NO_CARDS)
        return found

    def driver(self) -> str | None:
        """The driver's version; call only from inside `look`."""
        try:
            return str(self._library.nvmlSystemGetDriverVersion())
        except (self._library.NVMLError, AttributeError, OSError):
            return None

    def close(self) -> None:
        """Releases the library; the next `look` reopens it."""
        with contextlib.suppress(TimeoutError):
            self._bounded(self._close, _TIMEOUT_S)

    def _look(self, at: Callable[[NvmlCard], T]) -> list[T]:
        if not self._is_open:
            _preload_for_wsl()
            self._library.nvmlInit()
            self._is_open = True
        found: list[T] = []
        lost = False
        try:
            for index in range(self._library.nvmlDeviceGetCount()):
                try:
                    card = NvmlCard(self._library, self._library.nvmlDeviceGetHandleByIndex(index), index)
                except self._library.NVMLError as error:
                    if error.value in (pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
                        raise
                    lost = True  # this card is lost or not permitted; others may work
                    continue
                found.append(at(card))
                lost |= card.lost
        except self._library.NVMLError:
            self._close()
            raise
        if lost:
            self._close()
        return found

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(self._library.NVMLError, AttributeError, OSError):
                self._library.nvmlShutdown()


def nvidia_gpus(nvml: Nvml) -> tuple[tuple[GpuInfo, ...], str]:
    """(the cards, a note on why there are none)."""
    ours = own_processes()
    try:
        return tuple(nvml.look(lambda card: _described(card, nvml.driver(), ours))), ""
    except NvmlUnavailableError as error:
        return (), str(error)


def own_processes() -> frozenset[int]:
    """This process and its descendants."""
    try:
        family = psutil.Process().children(recursive=True)
    except psutil.Error:
        family = []
    return frozenset((os.getpid(), *(process.pid for process in family)))


def memory_of(card: NvmlCard, ours: frozenset[int]) -> tuple[int | None, int | None, int | None, int | None]:
    """(total, free, used by `ours`, used by others) in bytes.

    On Windows the driver does not report memory per program; the last two are then None.
    """
    memory = card.read("nvmlDeviceGetMemoryInfo")
    if memory is None:
        return None, None, None, None
    total, free = int(memory.total), int(memory.free)
    listings = [
        card.read(f"nvmlDeviceGet{kind}RunningProcesses") for kind in ("Compute", "Graphics")
    ]  # fmt: skip
    if all(listing is None for listing in listings):
        return total, free, None, None
    # A program that computes and draws is in both lists with the same memory.
    by_process = {process.pid: process.usedGpuMemory for listing in listings for process in listing or ()}
    held = [nbytes for pid, nbytes in by_process.items() if pid in ours]
    if any(nbytes is None for nbytes in held):
        return total, free, None, None
    mine = sum(int(nbytes) for nbytes in held)
    return total, free, mine, max(0, total - free - mine)


def _described(card: NvmlCard, driver: str | None, ours: frozenset[int]) -> GpuInfo:
    total, free, _, others = memory_of(card, ours)
    capability = card.read("nvmlDeviceGetCudaComputeCapability")
    limit_mw = card.read("nvmlDeviceGetEnforcedPowerLimit")
    place = card.read("nvmlDeviceGetPciInfo")
    display = card.read("nvmlDeviceGetDisplayActive")
    return GpuInfo(
        name=card.read("nvmlDeviceGetName") or "NVIDIA card",
        total_bytes=total,
        free_bytes=free,
        driver=driver,
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        pcie_generation=card.read("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=card.read("nvmlDeviceGetMaxPcieLinkWidth"),
        used_by_others_bytes=others,
        pcie_generation_now=card.read("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_width_now=card.read("nvmlDeviceGetCurrPcieLinkWidth"),
        power_limit_w=None if limit_mw is None else limit_mw / 1e3,
        vendor=Vendor.NVIDIA,
        bus=_text(getattr(place, "busId", None)),
        memory_bytes_per_s=_memory_bandwidth(card),
        shader_flops=_shader_flops(card),
        shows_desktop=None if display is None else bool(display),
    )


def _memory_bandwidth(card: NvmlCard) -> float | None:
    """DDR: two bits per line and clock cycle."""
    lines = card.read("nvmlDeviceGetMemoryBusWidth")
    megahertz = card.read("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM)
    return 2 * megahertz * 1e6 * lines / 8 if lines and megahertz else None


def _shader_flops(card: NvmlCard) -> float | None:
    """One FMA per core and cycle."""
    cores = card.read("nvmlDeviceGetNumGpuCores")
    megahertz = card.read("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM)
    return 2 * cores * megahertz * 1e6 if cores and megahertz else None


def _preload_for_wsl() -> None:
    """In WSL not every loader searches the library's folder; once loaded by path, it is found by name."""
    if _WSL_LIBRARY.exists():
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(_WSL_LIBRARY))


def _reason(error: Any) -> str:
    return _REASONS.get(error.value, f"The NVIDIA driver does not work ({_first_line(error)}): restart or update it.")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _text(value: object) -> str | None:
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    return value.lower() if isinstance(value, str) and value else None
