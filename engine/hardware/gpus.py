"""All graphics cards of this machine, most useful first.

NVIDIA's come from NVML, AMD's and Intel's from Linux's `/sys/class/drm`, all others from the Windows registry, and
Apple's chips are part of the processor.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from engine.hardware.gpu_info import GpuInfo, Vendor
from engine.hardware.nvml import Nvml, nvidia_gpus
from engine.hardware.surroundings import number_of, output_of, text_of

DRM = Path("/sys/class/drm")
_VENDORS = {"0x1002": Vendor.AMD, "0x8086": Vendor.INTEL}
_NAME_LISTS = (Path("/usr/share/hwdata/pci.ids"), Path("/usr/share/misc/pci.ids"))
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generations by GT/s."""
_SMALL_APERTURE = 4 * 2**30
"""An AMD card without a `mem_busy_percent` file and with less memory than this is integrated."""


@dataclass(frozen=True, slots=True)
class SysfsCard:
    """The kernel's folders of a card."""

    device: Path
    vendor: Vendor

    @property
    def bus(self) -> str:
        """Its PCI address, such as `0000:03:00.0`."""
        return self.device.resolve().name


def sysfs_cards(root: Path = DRM) -> list[SysfsCard]:
    """AMD's and Intel's cards in the order of their numbers.  NVIDIA's are read through NVML."""
    found = []
    try:
        entries = sorted(root.iterdir(), key=lambda path: (len(path.name), path.name))
    except OSError:
        return []
    for entry in entries:
        vendor = _VENDORS.get((text_of(entry / "device" / "vendor") or "").lower())
        if re.fullmatch(r"card\d+", entry.name) and vendor is not None:
            found.append(SysfsCard(entry / "device", vendor))
    return found


def sysfs_gpus(root: Path = DRM) -> tuple[GpuInfo, ...]:
    """AMD's and Intel's cards."""
    return tuple(_described(card) for card in sysfs_cards(root))


def _described(card: SysfsCard) -> GpuInfo:
    device = card.device
    total, used = number_of(device / "mem_info_vram_total"), number_of(device / "mem_info_vram_used")
    is_integrated = _is_integrated(card, total)
    return GpuInfo(
        name=_name(card),
        total_bytes=total,
        free_bytes=None if total is None or used is None else max(0, total - used),
        driver=_driver(device),
        compute_capability=None,
        pcie_generation=None if is_integrated else _generation(device / "max_link_speed"),
        pcie_width=None if is_integrated else number_of(device / "max_link_width"),
        pcie_generation_now=None if is_integrated else _generation(device / "current_link_speed"),
        pcie_width_now=None if is_integrated else number_of(device / "current_link_width"),
        power_limit_w=_power_limit_w(device),
        vendor=card.vendor,
        is_integrated=is_integrated,
        bus=card.bus,
    )


def _is_integrated(card: SysfsCard, total: int | None) -> bool:
    if card.vendor is Vendor.INTEL:
        # Arc cards are behind their own bridges; integrated graphics are on the root bus, at 02.0.
        return re.fullmatch(r"0000:00:02\.\d", card.bus) is not None
    return not (card.device / "mem_busy_percent").exists() and (total or 0) < _SMALL_APERTURE


def _name(card: SysfsCard) -> str:
    name = text_of(card.device / "product_name")
    ids = [text_of(card.device / file) for file in ("vendor", "device")]
    if name is None and all(ids):
        name = _listed_name(*(str(number).removeprefix("0x").lower() for number in ids))
    if name is None and card.vendor is Vendor.AMD:
        name = _rocm_name(card.bus)
    maker = {Vendor.AMD: "AMD", Vendor.INTEL: "Intel"}.get(card.vendor, "")
    if name is None:
        return f"{maker} graphics {ids[1] or ''}".strip()
    return name if maker.lower() in name.lower() else f"{maker} {name}"


def _listed_name(vendor: str, device: str) -> str | None:
    """The name in the distribution's list of PCI ids: a vendor's line, then its devices, indented by a tab."""
    for path in _NAME_LISTS:
        block = re.search(rf"^{vendor}  .*\n((?:[\t#].*\n?)*)", text_of(path) or "", re.MULTILINE)
        line = re.search(rf"^\t{device}  (.+)$", block[1], re.MULTILINE) if block else None
        if line:
            # `Navi 31 [Radeon RX 7900 XTX]`: the name in brackets is the well-known one.
            known = re.search(r"\[(.+)\]", line[1])
            return known[1] if known else line[1]
    return None


def _rocm_name(bus: str) -> str | None:
    """The card's name according to AMD's tool, if installed."""
    if shutil.which("rocm-smi") is None:
        return None
    try:
        cards = json.loads(output_of("rocm-smi", "--showproductname", "--showbus", "--json") or "{}")
        for card in cards.values():
            if str(card.get("PCI Bus", "")).lower() == bus.lower():
                return str(card.get("Card Series") or card.get("Card series") or "") or None
    except (ValueError, AttributeError):
        pass
    return None


def _driver(device: Path) -> str | None:
    driver = device / "driver"
    if not driver.exists():
        return None
    version = text_of(driver / "module" / "version")
    name = driver.resolve().name
    return f"{name} {version}" if version else name


def _generation(path: Path) -> int | None:
    match = re.match(r"([\d.]+) GT/s", text_of(path) or "")
    return _GENERATIONS.get(float(match[1])) if match else None


def _power_limit_w(device: Path) -> float | None:
    for path in sorted(device.glob("hwmon/hwmon*/power1_cap")):
        microwatts = number_of(path)
        if microwatts:
            return microwatts / 1e6
    return None


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


_ORDER = (Vendor.NVIDIA, Vendor.AMD, Vendor.APPLE, Vendor.INTEL, Vendor.OTHER)
_nvml = Nvml()


def graphics_cards(nvml: Nvml = _nvml, drm: Path = DRM) -> tuple[tuple[GpuInfo, ...], str]:
    """(the cards, a note on why there are none or NVIDIA's are missing).

    The note is empty only if NVIDIA's driver responded, or if there is none and other cards were found.
    """
    ours, note = nvidia_gpus(nvml)
    others = (*sysfs_gpus(drm), *other_gpus())
    found = sorted((*ours, *others), key=lambda gpu: (gpu.is_integrated, _ORDER.index(gpu.vendor)))
    if found and note.startswith("No NVIDIA driver"):
        note = ""
    return tuple(found), note
