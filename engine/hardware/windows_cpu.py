"""The CPU according to Windows: parses `GetLogicalProcessorInformationEx`."""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

import psutil

from engine.hardware.cpu import KNOWN_INSTRUCTIONS, CpuInfo

_ALL_RELATIONS = 0xFFFF
_CORE, _CACHE = 0, 2
_INSTRUCTION_CACHE = 1
_FEATURES = {38: "sse4_2", 39: "avx", 40: "avx2", 41: "avx512f", 19: "asimd", 43: "asimddp"}
"""Numbers of `IsProcessorFeaturePresent`."""


def windows_cpu() -> CpuInfo:
    """This machine's CPU."""
    return described(_topology(), _features(), _name())


def described(topology: bytes, features: frozenset[str], name: str | None) -> CpuInfo:
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

    def _topology() -> bytes:
        kernel = ctypes.WinDLL("kernel32")
        needed = ctypes.c_uint32(0)
        kernel.GetLogicalProcessorInformationEx(_ALL_RELATIONS, None, ctypes.byref(needed))
        room = ctypes.create_string_buffer(needed.value)
        succeeded = kernel.GetLogicalProcessorInformationEx(_ALL_RELATIONS, room, ctypes.byref(needed))
        return room.raw[: needed.value] if succeeded else b""

    def _features() -> frozenset[str]:
        kernel = ctypes.WinDLL("kernel32")
        return frozenset(name for number, name in _FEATURES.items() if kernel.IsProcessorFeaturePresent(number))

else:

    def _topology() -> bytes:
        return b""

    def _features() -> frozenset[str]:
        return frozenset()


def _name() -> str | None:
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
                return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        except OSError:
            pass
    return platform.processor() or None
