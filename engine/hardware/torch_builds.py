"""Which build of PyTorch uses this machine's graphics cards, and why.

What each build of 2.13.0 runs on, read in November 2026: its wheels' lists of architectures and NVIDIA's table of
drivers.  There is none for CUDA 12.8 any more.

Set-up from a checkout and the window choose by this alone.  It uses nothing but the standard library, since set-up
imports it before anything is installed.
"""

from __future__ import annotations

import csv
import importlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "SWITCHYARD_TORCH"
"""Environment variable that names the build instead."""
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
KFD = Path("/dev/kfd")
NVIDIA_VERSION = Path("/proc/driver/nvidia/version")
_WITHIN_S = 20.0
_ROCM_CARDS = (
    *("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950"),
    *("gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201"),
)
"""Of the ROCm 7.2 build, without graphics of processors."""
DRM_CARDS = Path("/sys/class/drm")
_ARC = re.compile("0bd.|56..|e2..")
"""Numbers of Intel's cards with memory of their own: Max, Arc A and Arc B."""


@dataclass(frozen=True)
class Build:
    """A build of PyTorch.

    Attributes:
        label: as in the version and in the index's address.
        name: for people.
        disk_gb: what it takes, with what comes along.
    """

    label: str
    name: str
    disk_gb: float


CPU = Build("cpu", "CPU", 3.0)
CUDA_126 = Build("cu126", "CUDA 12.6", 8.0)
CUDA_130 = Build("cu130", "CUDA 13.0", 9.0)
ROCM = Build("rocm7.2", "ROCm 7.2", 18.0)
XPU = Build("xpu", "Intel XPU", 8.0)
BUILDS = {build.label: build for build in (CPU, CUDA_126, CUDA_130, ROCM, XPU)}


@dataclass(frozen=True)
class NvidiaCard:
    """A card as NVIDIA's driver describes it; `capability` is None if a driver is too old to say."""

    name: str
    driver: str
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Choice:
    """A build, and why it was chosen or what speaks against a better one: sentences, or nothing to say."""

    build: Build
    why: str = ""
    is_asked: bool = False


def chosen() -> Choice:
    """The build for this machine."""
    named = os.environ.get(VARIABLE, "").strip().lower()
    if named in BUILDS:
        return Choice(BUILDS[named], f"{VARIABLE} asks for it.", is_asked=True)
    choice = choose(
        platform.system(), nvidia_cards(), amd_cards(), intel_cards(), can_open_kfd=os.access(KFD, os.R_OK | os.W_OK)
    )
    if named:
        return Choice(choice.build, f"{VARIABLE}={named} is none of {', '.join(BUILDS)}. {choice.why}".strip())
    return choice


def choose(
    system: str, nvidia: list[NvidiaCard], amd: list[str], intel: Sequence[str] = (), *, can_open_kfd: bool = True
) -> Choice:
    """The build for these cards: the best card decides.

    Args:
        system: as `platform.system()` says.
        amd: architectures of AMD's cards, such as `gfx1100`.
        intel: numbers of Intel's cards with memory of their own, such as `e20b`.
        can_open_kfd: whether this user may use AMD's cards.
    """
    if nvidia:
        newest_first = sorted(nvidia, key=lambda card: card.capability or (0, 0), reverse=True)
        return min((_for_nvidia(system, card) for card in newest_first), key=lambda each: each.build is CPU)
    if intel and system in ("Linux", "Windows") and not (amd and system == "Linux"):
        return Choice(XPU, "For an Intel card. No card of Intel's has been tried with Switchyard yet.")
    if system == "Darwin":
        return Choice(
            CPU, "The build for Macs, with Apple's graphics: `--device mps` uses them, which nobody has tried yet."
        )
    if not amd or system != "Linux":
        return Choice(CPU)
    usable = [card for card in amd if card in _ROCM_CARDS]
    if not usable:
        return Choice(CPU, f"PyTorch has no kernels for AMD's {', '.join(amd)}, so models run on the CPU.")
    if not can_open_kfd:
        return Choice(
            CPU,
            "This user may not use the AMD card: `sudo usermod -aG render,video $USER`, log in again, and try again.",
        )
    return Choice(ROCM, f"For an AMD card ({', '.join(usable)}). No card of AMD's has been tried with Switchyard yet.")


def _for_nvidia(system: str, card: NvidiaCard) -> Choice:
    capability = card.capability or (7, 5)  # unknown: the proof shows whether it works
    series = _numbers(card.driver)  # unknown: the same
    is_known = bool(series)
    newest, older = (580,), ((528,) if system == "Windows" else (525,))
    if capability < (5, 0):
        return Choice(CPU, f"PyTorch no longer runs on a card as old as {card.name}: models run on the CPU.")
    if capability >= (7, 5) and (not is_known or series >= newest):
        return Choice(CUDA_130, f"For {card.name} with driver {card.driver or 'of unknown version'}.")
    if capability >= (10, 0):
        return Choice(
            CPU,
            f"{card.name} needs driver 580 or newer, and {card.driver} is installed: update it, then try again. "
            "Until then models run on the CPU.",
        )
    if series >= older or not is_known:
        if capability < (7, 5):
            return Choice(CUDA_126, f"For {card.name}, for which CUDA 13 has no kernels any more.")
        return Choice(CUDA_126, f"For {card.name} with driver {card.driver}; driver 580 or newer allows CUDA 13.0.")
    return Choice(
        CPU,
        f"{card.name} needs driver {older[0]} or newer, and {card.driver} is installed: update it, then try again. "
        "Until then models run on the CPU.",
    )


def nvidia_cards() -> list[NvidiaCard]:
    """NVIDIA's cards; none without a driver that responds."""
    program = shutil.which("nvidia-smi")
    cards = _listed(program, "name,driver_version,compute_cap") or _listed(program, "name,driver_version")
    if cards or not NVIDIA_VERSION.exists():
        return cards
    found = re.search(r"\b(\d{3,}\.\d[\d.]*)", NVIDIA_VERSION.read_text(encoding="utf-8", errors="replace"))
    return [NvidiaCard("the NVIDIA card", found[1] if found else "")]


def _listed(program: str | None, fields: str) -> list[NvidiaCard]:
    if program is None:
        return []
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        said = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_WITHIN_S,
            check=True,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    cards = []
    for row in csv.reader(said.splitlines(), skipinitialspace=True):
        if len(row) >= 2:
            capability = _numbers(row[2]) if len(row) > 2 else ()
            pair = (capability[0], capability[1]) if len(capability) == 2 else None
            cards.append(NvidiaCard(row[0].strip(), row[1].strip(), pair))
    return cards


def amd_cards(nodes: Path = KFD_NODES) -> list[str]:
    """Architectures of AMD's cards that the kernel's compute driver has, each once."""
    found: dict[str, None] = {}
    try:
        files = sorted(nodes.glob("*/properties"))
    except OSError:
        return []
    for file in files:
        try:
            number = re.search(r"^gfx_target_version (\d+)$", file.read_text(encoding="ascii"), re.MULTILINE)
        except (OSError, ValueError):
            continue
        if number and int(number[1]):  # 0 is a processor
            major, rest = divmod(int(number[1]), 10_000)
            found[f"gfx{major}{rest // 100}{rest % 100:x}"] = None
    return list(found)


def intel_cards(drm: Path = DRM_CARDS) -> list[str]:
    """Numbers of Intel's cards with memory of their own, in sixteens, each once."""
    is_windows = platform.system() == "Windows"
    found = _in_registry(importlib.import_module("winreg")) if is_windows else _in_drm(drm)
    return list(dict.fromkeys(number for number in found if _ARC.fullmatch(number)))


def _in_drm(drm: Path) -> list[str]:
    found = []
    for card in sorted(drm.glob("card[0-9]*")):
        try:
            vendor = (card / "device" / "vendor").read_text(encoding="ascii").strip()
            device = (card / "device" / "device").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if vendor == "0x8086":
            found.append(device.removeprefix("0x").lower())
    return found


def _in_registry(registry: Any) -> list[str]:
    displays = r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
    found = []
    for number in range(16):
        try:
            with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, f"{displays}\\{number:04d}") as key:
                name = str(registry.QueryValueEx(key, "MatchingDeviceId")[0]).lower()
        except OSError:
            continue
        if said := re.search("ven_8086&dev_([0-9a-f]{4})", name):
            found.append(said[1])
    return found


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.strip().split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()
