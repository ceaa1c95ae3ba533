"""The CPU: its name, cores, caches and vector instructions, and which of its cores compute.

The fast cores of a hybrid CPU compute, one thread each, within affinity and quota. Experts and linear layers wait for
memory and share a core's execution units: a core's second thread gains nothing, and a slow core makes the fast ones
wait at the end of every layer. Threads are counted, not pinned: the scheduler moves busy threads to fast cores by
itself and knows what else runs, and a pinned thread that loses its core to another program stalls the whole team.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.hardware.surroundings import cpu_quota, cpus_of, number_of, output_of, text_of

_ALL_RELATIONS = 0xFFFF
_CORE, _CACHE = 0, 2
_INSTRUCTION_CACHE = 1
_FEATURES = {38: "sse4_2", 39: "avx", 40: "avx2", 41: "avx512f", 19: "asimd", 43: "asimddp"}
"""Numbers of `IsProcessorFeaturePresent`."""


def windows_cpu() -> CpuInfo:
    return windows_cpu_of(_windows_topology(), _windows_features(), _windows_name())


def windows_cpu_of(topology: bytes, features: frozenset[str], name: str | None) -> CpuInfo:
    """The CPU described by consecutive `SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX` structures."""
    classes: list[int] = []
    caches = {2: 0, 3: 0}
    offset = 0
    while offset + 8 <= len(topology):
        relation, size = struct.unpack_from("<II", topology, offset)
        if size < 8 or offset + size > len(topology):
            break
        if relation == _CORE:
            classes.append(topology[offset + 9])
        elif relation == _CACHE and size >= 20:
            level, _, _, nbytes, kind = struct.unpack_from("<BBHII", topology, offset + 8)
            if level in caches and kind != _INSTRUCTION_CACHE:
                caches[level] += nbytes
        offset += size
    mixed = len(set(classes)) > 1
    frugal = classes.count(min(classes)) if mixed else 0
    frequency = psutil.cpu_freq()
    return CpuInfo(
        name=name,
        physical_cores=len(classes) or psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        performance_cores=len(classes) - frugal if mixed else None,
        efficiency_cores=frugal if mixed else None,
        l2_bytes=caches[2] or None,
        l3_bytes=caches[3] or None,
        instructions=tuple(name for name in KNOWN_INSTRUCTIONS if name in features),
        max_hz=frequency.max * 1e6 if frequency is not None and frequency.max else None,
    )


if sys.platform == "win32":

    def _windows_topology() -> bytes:
        kernel = ctypes.WinDLL("kernel32")
        needed = ctypes.c_uint32(0)
        kernel.GetLogicalProcessorInformationEx(_ALL_RELATIONS, None, ctypes.byref(needed))
        room = ctypes.create_string_buffer(needed.value)
        succeeded = kernel.GetLogicalProcessorInformationEx(_ALL_RELATIONS, room, ctypes.byref(needed))
        return room.raw[: needed.value] if succeeded else b""

    def _windows_features() -> frozenset[str]:
        kernel = ctypes.WinDLL("kernel32")
        return frozenset(name for number, name in _FEATURES.items() if kernel.IsProcessorFeaturePresent(number))

else:

    def _windows_topology() -> bytes:
        return b""

    def _windows_features() -> frozenset[str]:
        return frozenset()


def _windows_name() -> str | None:
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
                return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        except OSError:
            pass
    return platform.processor() or None


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


def cpu_info() -> CpuInfo:
    system = platform.system()
    if system == "Windows":
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
    fast = {cores[cpu] for cpu in fast_cpus(hybrid, system) & cores.keys()}
    fastest_khz = max((number_of(system / f"cpu{cpu}" / "cpufreq" / "cpuinfo_max_freq") or 0) for cpu in cpus)
    nodes = cpus_of(text_of(system.parent / "node" / "online"))
    return CpuInfo(
        name=fields.get("model name") or fields.get("Model") or platform.processor() or None,
        physical_cores=len(set(cores.values())) if known else psutil.cpu_count(logical=False),
        logical_cores=len(cpus),
        performance_cores=len(fast) or None,
        efficiency_cores=len(set(cores.values()) - fast) if fast else None,
        l2_bytes=_cache_bytes(system, cpus, 2),
        l3_bytes=_cache_bytes(system, cpus, 3),
        instructions=tuple(name for name in KNOWN_INSTRUCTIONS if name in flags),
        max_hz=fastest_khz * 1e3 or None,
        numa_nodes=len(nodes) or None,
    )


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


_DEVICES = Path("/sys/devices")
_SLOW = 0.6
"""Below this fraction of the fastest core's capacity or clock, a core counts as an efficiency core.

Cores of one kind differ by a few per cent (favoured cores); the middle tier of three still counts as fast."""


def compute_threads(allowed: frozenset[int] | None = None, quota: float | None = None) -> int:
    """The optimal number of compute threads: one per fast physical core that this process may use, at least one.

    Args:
        allowed: logical CPUs of this process' affinity; `None` asks the system.
        quota: CPU time, in CPUs, that it may use; `None` asks the control groups.
    """
    if allowed is None:
        allowed = allowed_cpus()
    if quota is None:
        quota = cpu_quota()
    cores = len(compute_cpus(allowed)) if platform.system() == "Linux" else _cores_elsewhere(len(allowed))
    return max(1, cores if quota is None else min(cores, int(quota)))


def allowed_cpus() -> frozenset[int]:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    try:
        return frozenset(psutil.Process().cpu_affinity() or ())
    except (AttributeError, psutil.Error, OSError):  # not supported on macOS
        return frozenset(range(os.cpu_count() or 1))


def compute_cpus(allowed: frozenset[int], devices: Path = _DEVICES) -> tuple[int, ...]:
    """One logical CPU for each allowed fast physical core, according to Linux.

    Efficiency cores only if nothing else is allowed.
    """
    fast = (fast_cpus(devices) or allowed) & allowed or allowed
    first: dict[tuple[str | int, ...], int] = {}
    for cpu in sorted(fast):
        topology = devices / "system" / "cpu" / f"cpu{cpu}" / "topology"
        package, core = text_of(topology / "physical_package_id"), text_of(topology / "core_id")
        # Core ids are unique only within a package and, on some Arm CPUs, within a cluster.
        cluster = text_of(topology / "cluster_id") or ""
        first.setdefault((cpu,) if package is None or core is None else (package, cluster, core), cpu)
    return tuple(first.values())


def fast_cpus(devices: Path = _DEVICES, system: Path | None = None) -> frozenset[int]:
    """Logical CPUs of the fast kind; empty if all are alike or the kind is unknown.

    Intel's hybrids are listed by kind; Arm's have a capacity; for others the maximum clock decides.
    """
    fast, frugal = (cpus_of(text_of(devices / kind / "cpus")) for kind in ("cpu_core", "cpu_atom"))
    if fast and frugal:
        return fast
    system = system or devices / "system" / "cpu"
    cpus = cpus_of(text_of(system / "online"))
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        values = {cpu: number_of(system / f"cpu{cpu}" / file) for cpu in cpus}
        known = {cpu: value for cpu, value in values.items() if value}
        if known and len(known) == len(cpus) and min(known.values()) < _SLOW * max(known.values()):
            return frozenset(cpu for cpu, value in known.items() if value >= _SLOW * max(known.values()))
    return frozenset()


def _cores_elsewhere(allowed: int) -> int:
    """Number of fast physical cores on macOS and Windows, where core ids cannot be matched with affinity."""
    fast = None
    if platform.system() == "Darwin":
        count = output_of("sysctl", "-n", "hw.perflevel0.physicalcpu") or ""
        fast = int(count) if count.isdecimal() else None
    elif platform.system() == "Windows":
        fast = windows_cpu().performance_cores
    return max(1, min(fast or psutil.cpu_count(logical=False) or 1, allowed))
