"""Current activity of graphics cards, according to their drivers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pynvml

from engine.hardware.gpu_info import Vendor
from engine.hardware.gpus import DRM, SysfsCard, sysfs_cards
from engine.hardware.nvml import Nvml, NvmlCard, NvmlUnavailableError, memory_of, own_processes
from engine.hardware.system_files import number_of

_TIMEOUT_S = 2.0
_SLOWED_BY = (
    ("HwThermalSlowdown", "heat"),
    ("SwThermalSlowdown", "heat"),
    ("SwPowerCap", "power limit"),
    ("HwPowerBrakeSlowdown", "power supply"),
    ("HwSlowdown", "hardware"),
)


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One card at one moment; unknown values are None.

    Attributes:
        busy: fraction of the driver's last sampling period in which a kernel ran.
        memory_busy: the same for its memory.
        vram_total, vram_used, vram_ours, vram_others: bytes; `vram_ours` is this program's and its children's.
        clock_hz, memory_clock_hz: current.
        power_w, power_limit_w, temperature_c: current.
        pcie_rx, pcie_tx: bytes per second to and from the card, of all programs, sampled by the driver over 20 ms.
        slowed_by: why it runs below its maximum clock, such as `heat`; empty if it does not, or if unknown.
    """

    bus: str
    vendor: Vendor
    busy: float | None = None
    memory_busy: float | None = None
    vram_total: int | None = None
    vram_used: int | None = None
    vram_ours: int | None = None
    vram_others: int | None = None
    clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    pcie_rx: float | None = None
    pcie_tx: float | None = None
    slowed_by: tuple[str, ...] = ()


class GpuSensors:
    """Reads all cards.  Cards disappear with their driver and reappear with it.

    Args:
        pids: our processes.
    """

    def __init__(
        self, nvml: Nvml | None = None, drm: Path = DRM, pids: Callable[[], Iterable[int]] = own_processes
    ) -> None:
        self._pids = pids
        self._nvml = nvml or Nvml()
        self._drm = drm
        self._seen: tuple[GpuSample, ...] = ()

    def sample(self) -> tuple[GpuSample, ...]:
        """NVIDIA's cards in driver order, then the others.

        A card that no longer responds is still listed, with all values unknown.
        """
        ours = frozenset(self._pids())
        try:
            found = tuple(self._nvml.look(lambda card: _nvidia(card, ours), timeout_s=_TIMEOUT_S))
        except NvmlUnavailableError:
            found = ()
        found += tuple(_sysfs(card) for card in sysfs_cards(self._drm))
        here = {one.bus for one in found}
        lost = tuple(GpuSample(one.bus, one.vendor) for one in self._seen if one.bus not in here)
        self._seen = (*found, *lost)
        return self._seen

    def close(self) -> None:
        """Releases the driver's library."""
        self._nvml.close()


def _nvidia(card: NvmlCard, ours: frozenset[int]) -> GpuSample:
    total, free, mine, others = memory_of(card, ours)
    busy = card.read("nvmlDeviceGetUtilizationRates")
    place = getattr(card.read("nvmlDeviceGetPciInfo"), "busId", None)
    reasons = card.read("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # name in drivers before 2023
        reasons = card.read("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuSample(
        bus=(place.decode("ascii", "replace") if isinstance(place, bytes) else str(place or card.index)).lower(),
        vendor=Vendor.NVIDIA,
        busy=None if busy is None else busy.gpu / 100,
        memory_busy=None if busy is None else busy.memory / 100,
        vram_total=total,
        vram_used=None if total is None or free is None else total - free,
        vram_ours=mine,
        vram_others=others,
        clock_hz=_scaled(card.read("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM), 1e6),
        memory_clock_hz=_scaled(card.read("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM), 1e6),
        power_w=_scaled(card.read("nvmlDeviceGetPowerUsage"), 1e-3),
        power_limit_w=_scaled(card.read("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
        temperature_c=_scaled(card.read("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU), 1.0),
        pcie_rx=_scaled(card.read("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_RX_BYTES), 1e3),
        pcie_tx=_scaled(card.read("nvmlDeviceGetPcieThroughput", pynvml.NVML_PCIE_UTIL_TX_BYTES), 1e3),
        slowed_by=_slowed_by(reasons or 0),
    )


def _slowed_by(reasons: int) -> tuple[str, ...]:
    found = (why for name, why in _SLOWED_BY if reasons & getattr(pynvml, f"nvmlClocksThrottleReason{name}"))
    return tuple(dict.fromkeys(found))


def _sysfs(card: SysfsCard) -> GpuSample:
    device = card.device

    def sensor(name: str, scale: float) -> float | None:
        values = (number_of(path) for path in sorted(device.glob(f"hwmon/hwmon*/{name}")))
        return _scaled(next((value for value in values if value is not None), None), scale)

    total, used = number_of(device / "mem_info_vram_total"), number_of(device / "mem_info_vram_used")
    return GpuSample(
        bus=card.bus,
        vendor=card.vendor,
        busy=_scaled(number_of(device / "gpu_busy_percent"), 0.01),
        memory_busy=_scaled(number_of(device / "mem_busy_percent"), 0.01),
        vram_total=total,
        vram_used=used,
        clock_hz=sensor("freq1_input", 1.0),
        memory_clock_hz=sensor("freq2_input", 1.0),
        power_w=sensor("power1_average", 1e-6) or sensor("power1_input", 1e-6),
        power_limit_w=sensor("power1_cap", 1e-6),
        temperature_c=sensor("temp1_input", 1e-3),
    )


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale
