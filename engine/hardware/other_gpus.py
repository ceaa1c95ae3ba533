"""Cards that neither NVML nor Linux reports: those in the Windows registry, and Apple's chips."""

from __future__ import annotations

import importlib
import platform
from typing import Any

import psutil

from engine.hardware.gpu_info import GpuInfo, Vendor

_DISPLAY_CLASS = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
_INTEGRATED = 2 * 2**30
"""On Windows, drivers of integrated graphics report less memory than this."""


def other_gpus() -> tuple[GpuInfo, ...]:
    """AMD's, Intel's and Apple's cards on Windows and macOS."""
    system = platform.system()
    if system == "Windows":
        return registry_gpus(importlib.import_module("winreg"))
    return (apple_gpu(),) if system == "Darwin" and platform.machine() == "arm64" else ()


def apple_gpu() -> GpuInfo:
    """An Apple chip's GPU shares all of its RAM."""
    memory = psutil.virtual_memory()
    return GpuInfo(
        name="Apple graphics",
        total_bytes=memory.total,
        free_bytes=memory.available,
        driver=f"macOS {platform.mac_ver()[0]}",
        compute_capability=None,
        pcie_generation=None,
        vendor=Vendor.APPLE,
        is_integrated=True,
    )


def registry_gpus(registry: Any) -> tuple[GpuInfo, ...]:
    """Cards with Windows drivers, except NVIDIA's, read with the module `winreg`."""
    found: list[GpuInfo] = []
    try:
        with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, _DISPLAY_CLASS) as cards:
            for number in range(registry.QueryInfoKey(cards)[0]):
                gpu = _registry_gpu(registry, cards, registry.EnumKey(cards, number))
                if gpu is not None and gpu not in found:
                    found.append(gpu)
    except OSError:
        pass
    return tuple(found)


def _registry_gpu(registry: Any, cards: Any, number: str) -> GpuInfo | None:
    if not number.isdecimal():
        return None
    try:
        with registry.OpenKey(cards, number) as card:

            def value(name: str) -> Any:
                try:
                    return registry.QueryValueEx(card, name)[0]
                except OSError:
                    return None

            identity = str(value("MatchingDeviceId") or "").lower()
            vendor = next((who for mark, who in _PCI_VENDORS.items() if mark in identity), None)
            name, total = value("DriverDesc"), value("HardwareInformation.qwMemorySize")
            if vendor is None or not isinstance(name, str):
                return None
            total = total if isinstance(total, int) and total > 0 else None
            driver = value("DriverVersion")
            is_integrated = total is None or total < _INTEGRATED
            return GpuInfo(
                name, total, None, str(driver) if driver else None, None, None, vendor=vendor,
                is_integrated=is_integrated,
            )  # fmt: skip
    except OSError:  # a driver's key that only the system may read
        return None


_PCI_VENDORS = {"ven_1002": Vendor.AMD, "ven_8086": Vendor.INTEL}
