"""The CPU: its name, cores, caches and vector instructions."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.hardware.system_files import cpus_of, number_of, output_of, text_of

KNOWN_INSTRUCTIONS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx_vnni", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_SYSTEM = Path("/sys/devices/system/cpu")
_HYBRID = Path("/sys/devices")
_APPLE_NAMES = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16"}


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """A CPU; unknown values are None.

    Attributes:
        name: the manufacturer's name.
        physical_cores, logical_cores: over all sockets.
        performance_cores, efficiency_cores: physical; both None if all cores are alike.
        l2_bytes, l3_bytes: total over all caches of that level.
        instructions: vector instruction sets that it advertises (`/proc/cpuinfo` names).
        max_hz: of its fastest core.
        numa_nodes: number of NUMA nodes.
    """

    name: str | None
    physical_cores: int | None
    logical_cores: int | None
    performance_cores: int | None = None
    efficiency_cores: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None
    instructions: tuple[str, ...] = ()
    max_hz: float | None = None
    numa_nodes: int | None = None

    @property
    def has_smt(self) -> bool | None:
        """Whether a core runs several threads; None if unknown."""
        if self.physical_cores is None or self.logical_cores is None:
            return None
        return self.logical_cores > self.physical_cores


def cpu_info() -> CpuInfo:
    """This machine's CPU."""
    system = platform.system()
    if system == "Windows":
        from engine.hardware.windows_cpu import windows_cpu

        return windows_cpu()
    return _apple_cpu() if system == "Darwin" else linux_cpu()


def linux_cpu(
    system: Path = _SYSTEM, hybrid: Path = _HYBRID, described: Path = Path("/proc/cpuinfo")
) -> CpuInfo:  # fmt: skip
    """The CPU according to Linux."""
    fields: dict[str, str] = dict(re.findall(r"^([^:\n]+?)\s*: ?(.*)$", text_of(described) or "", re.MULTILINE))
    flags = frozenset(fields.get("flags", fields.get("Features", "")).split())
    cpus = sorted(cpus_of(text_of(system / "online"))) or list(range(psutil.cpu_count() or 1))
    cores: dict[int, tuple[str | None, ...]] = {}
    for cpu in cpus:
        topology = system / f"cpu{cpu}" / "topology"
        cores[cpu] = (text_of(topology / "physical_package_id"), text_of(topology / "core_id"))
    known = None not in {part for core in cores.values() for part in core}
    performance, efficiency = _kinds_of_cores(system, hybrid, cores)
    fastest_khz = max((number_of(system / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq") or 0) for cpu in cpus)
    nodes = cpus_of(text_of(system.parent / "node" / "online"))
    return CpuInfo(
        name=fields.get("model name") or fields.get("Model") or platform.processor() or None,
        physical_cores=len(set(cores.values())) if known else psutil.cpu_count(logical=False),
        logical_cores=len(cpus),
        performance_cores=performance,
        efficiency_cores=efficiency,
        l2_bytes=_cache_bytes(system, cpus, 2),
        l3_bytes=_cache_bytes(system, cpus, 3),
        instructions=tuple(name for name in KNOWN_INSTRUCTIONS if name in flags),
        max_hz=fastest_khz * 1e3 or None,
        numa_nodes=len(nodes) or None,
    )


def _kinds_of_cores(
    system: Path, hybrid: Path, cores: dict[int, tuple[str | None, ...]]
) -> tuple[int | None, int | None]:
    """(fast, frugal) physical cores: Intel lists hybrid cores by kind, Arm clusters differ in capacity."""
    fast, frugal = (cpus_of(text_of(hybrid / kind / "cpus")) for kind in ("cpu_core", "cpu_atom"))
    if not (fast and frugal):
        capacities = {cpu: number_of(system / f"cpu{cpu}" / "cpu_capacity") for cpu in cores}
        values = [value for value in capacities.values() if value is not None]
        if len(values) != len(cores) or len(set(values)) < 2:
            return None, None
        frugal = frozenset(cpu for cpu, value in capacities.items() if value == min(values))
        fast = frozenset(cores) - frugal
    return tuple(len({cores[cpu] for cpu in kind if cpu in cores}) for kind in (fast, frugal))  # type: ignore[return-value]


def _cache_bytes(system: Path, cpus: Iterable[int], level: int) -> int | None:
    """Counts each cache once, however many cores share it."""
    found: dict[tuple[str, str | None], int] = {}
    for cpu in cpus:
        for cache in (system / f"cpu{cpu}" / "cache").glob("index*"):
            size = bytes_of_size(text_of(cache / "size"))
            if number_of(cache / "level") == level and text_of(cache / "type") != "Instruction" and size:
                found[cache.name, text_of(cache / "shared_cpu_list") or str(cpu)] = size
    return sum(found.values()) or None


def bytes_of_size(text: str | None) -> int | None:
    """`2048K`, `32M` as bytes."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text or "")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else None


def _apple_cpu() -> CpuInfo:
    lines = (output_of("sysctl", "machdep.cpu", "hw") or "").splitlines()
    return apple_cpu(dict(line.split(": ", 1) for line in lines if ": " in line))


def apple_cpu(values: dict[str, str]) -> CpuInfo:
    """The CPU according to macOS's `sysctl`."""

    def number(name: str) -> int | None:
        value = values.get(name, "")
        return int(value) if value.isdecimal() else None

    words = " ".join(values.get(f"machdep.cpu.{name}", "") for name in ("features", "leaf7_features")).lower().split()
    flags = {word.replace("sse4.2", "sse4_2").replace("avx1.0", "avx") for word in words}
    if values.get("hw.optional.arm64") == "1":
        flags |= {"asimd"}
        flags |= {ours for theirs, ours in _APPLE_NAMES.items() if values.get(f"hw.optional.arm.{theirs}") == "1"}
    fast, frugal = number("hw.perflevel0.physicalcpu"), number("hw.perflevel1.physicalcpu")
    return CpuInfo(
        name=values.get("machdep.cpu.brand_string"),
        physical_cores=number("hw.physicalcpu"),
        logical_cores=number("hw.logicalcpu"),
        performance_cores=fast if frugal else None,
        efficiency_cores=frugal if fast else None,
        l2_bytes=number("hw.l2cachesize"),
        l3_bytes=number("hw.l3cachesize") or None,
        instructions=tuple(name for name in KNOWN_INSTRUCTIONS if name in flags),
        max_hz=float(number("hw.cpufrequency_max") or 0) or None,
    )
