"""`doctor`'s checks of software, graphics cards and folders."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.checkpoint.library import starter_is_built
from engine.common.installed import bundle, current_engine, version, window_folder
from engine.common.integrity import give_up_damaged
from engine.common.paths import cache_dir, config_dir, data_dir, log_dir, models_dir
from engine.common.sizes import about
from engine.devices.card_proof import prove_cards
from engine.families.library import RELEASE
from engine.hardware import torch_builds
from engine.hardware.disk import DiskKind
from engine.hardware.gpu_info import HIDING
from engine.hardware.measured import changes, load_measurements
from engine.hardware.probe import GpuInfo, Probe, Vendor, free_disk_bytes

_CAPABILITIES = {"12": ((5, 0), (9, 9)), "13": ((7, 5), (99, 9))}
"""Oldest and newest generations of cards for which torch's builds for CUDA 12.6 and 13 have kernels."""
_GIB = 2**30
_DISKS = {
    DiskKind.NVME: ", on an NVMe disk",
    DiskKind.SSD: ", on an SSD",
    DiskKind.HDD: ", on a hard disk: a model that does not fit into RAM will be slow",
    DiskKind.NETWORK: ", on a network share: a model that does not fit into RAM will be slow",
    DiskKind.HOST: ", in a folder of the host system: this system's own disk is faster",
}


class Status(StrEnum):
    """Severity: `PROBLEM` keeps Switchyard from working, `ADVICE` does not."""

    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and how to fix it."""

    name: str
    status: Status
    detail: str
    action: str = ""


def reinstall() -> str:
    """How what is installed is put right."""
    if bundle() is None:
        return "Run `python3 installers/start.py` in the checkout again."
    return "Install Switchyard again; models and chats stay."


def software_findings() -> list[Finding]:
    """Python and the main packages, from their metadata: none is imported."""
    findings = [Finding("Python", Status.OK, f"{platform.python_version()} ({sys.executable})")]
    if (packed := bundle()) is not None:
        findings.append(Finding("package", Status.OK, f"{packed.packaged_as}, version {version()}"))
        engine = current_engine()
        damage = give_up_damaged(engine.folder) if engine is not None else None
        if damage is not None or engine is None:
            action = "Open the window: its first page fetches it."
            detail = (
                f"{damage.message.partition(': ')[0]}." if damage is not None else "It is not on this computer yet."
            )
            return [*findings, Finding("engine", Status.PROBLEM, detail, action)]
    for name, distribution in (
        ("torch", "torch"),
        ("transformers", "transformers"),
        ("PySide6", "PySide6-Essentials"),
    ):
        found = _installed(distribution)
        if found is None:
            findings.append(Finding(name, Status.PROBLEM, f"{name} is not installed.", reinstall()))
        elif name == "transformers" and not found.startswith(f"{RELEASE}."):
            detail = f"{found}, but Switchyard needs {RELEASE} for its model loading."
            findings.append(Finding(name, Status.PROBLEM, detail, reinstall()))
        else:
            findings.append(Finding(name, Status.OK, found))
    return findings


def gpu_findings(hardware: Probe) -> list[Finding]:
    """The graphics cards, and whether the installed torch can use them."""
    findings = [_gpu_finding(gpu) for gpu in hardware.gpus]
    if hardware.compute_gpu is None:
        note = hardware.gpu_note or "There is no discrete graphics card."
        findings.append(Finding("graphics card", Status.OK, f"{note} Models run on the CPU."))
    elif hardware.gpu_note:
        findings.append(Finding("graphics card", Status.ADVICE, hardware.gpu_note))
    return findings


def build_findings() -> list[Finding]:
    """Whether torch's build is the one for this machine's cards and drivers, and why; nothing without a card.

    Takes seconds where NVIDIA's driver does not answer.
    """
    if _installed("torch") is None:
        return []
    choice, found = torch_builds.chosen(), _torch_build()
    if not choice.why and choice.build is found:
        return []
    name = "torch's build"
    if choice.build is not found:
        why = choice.why or "no graphics card was found that another one would use."
        detail = f"{found.name}, but {choice.build.name} is the one for this machine. {_sentence(why)}"
        return [Finding(name, Status.ADVICE, detail, reinstall())]
    lacks = choice.build is torch_builds.CPU and platform.system() != "Darwin" and not choice.is_asked
    return [Finding(name, Status.ADVICE if lacks else Status.OK, f"{found.name}. {choice.why}")]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _torch_build() -> torch_builds.Build:
    """The installed build, by what it was made for."""
    cuda = torch_cuda_version()
    if cuda is not None:
        label = f"cu{cuda.replace('.', '')}"
        return torch_builds.BUILDS.get(label, torch_builds.Build(label, f"CUDA {cuda}", 0.0))
    if torch_hip_version() is not None:
        return torch_builds.ROCM
    return torch_builds.XPU if torch_xpu_version() is not None else torch_builds.CPU


def proof_findings(hardware: Probe) -> list[Finding]:
    """Whether torch computes on the cards that it sees, where it is built for cards; takes seconds there."""
    if hardware.compute_gpu is None or not any((torch_cuda_version(), torch_hip_version(), torch_xpu_version())):
        return []
    name, proofs = "card's arithmetic", prove_cards()
    if proofs is None:
        return [
            Finding(name, Status.ADVICE, "torch ended while it was tried on the card.", "Update the card's driver.")
        ]
    if not proofs:
        hiding = next((each for each in HIDING if each in os.environ), None)
        action = "Update the card's driver and restart."
        if hiding is not None:
            action = f"{hiding} is {os.environ[hiding]!r}, which may hide the card: remove it. {action}"
        return [Finding(name, Status.ADVICE, "torch sees no card that it can use: models run on the CPU.", action)]
    if failed := [f"{each.name}: {each.failed}" for each in proofs if each.failed]:
        return [Finding(name, Status.ADVICE, f"{'; '.join(failed)}.", reinstall())]
    return [Finding(name, Status.OK, f"tested on {', '.join(each.name for each in proofs)}")]


def _gpu_finding(gpu: GpuInfo) -> Finding:
    detail = _described(gpu)
    cuda = torch_cuda_version()
    if gpu.vendor is Vendor.APPLE:
        said = "models run on the CPU, and with `--device mps` on it, which nobody has tried on one yet."
        return Finding("graphics card", Status.OK, f"{detail}; {said}")
    if gpu.is_integrated or gpu.vendor not in (Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL):
        return Finding("graphics card", Status.OK, f"{detail}; models do not run on it.")
    if gpu.vendor is Vendor.INTEL:
        if torch_xpu_version() is not None:
            return Finding("graphics card", Status.OK, f"{detail}; torch is built for XPU.")
        detail += "; the installed torch was built without XPU, so the card is not used."
        return Finding("graphics card", Status.ADVICE, detail, f"{reinstall()} It chooses torch's build for Arc cards.")
    if gpu.vendor is Vendor.AMD:
        if torch_hip_version() is not None:
            return Finding("graphics card", Status.OK, f"{detail}; torch is built for ROCm.")
        detail += "; the installed torch was built without ROCm, so the card is not used."
        return Finding(
            "graphics card", Status.ADVICE, detail, f"{reinstall()} On Linux it chooses torch's build for ROCm."
        )
    if cuda is None:
        detail += "; the installed torch was built without CUDA, so the card is not used."
        return Finding("graphics card", Status.ADVICE, detail, reinstall())
    capability = _capability(gpu.compute_capability)
    oldest, newest = _CAPABILITIES.get(cuda.partition(".")[0], (capability, capability))
    if not oldest <= capability <= newest:
        age = "old" if capability < oldest else "new"
        detail += f"; torch for CUDA {cuda} has no kernels for cards this {age} (capability {gpu.compute_capability})."
        return Finding("graphics card", Status.ADVICE, detail, f"{reinstall()} It chooses another build of torch.")
    return Finding("graphics card", Status.OK, f"{detail}; torch is built for CUDA {cuda}.")


def _described(gpu: GpuInfo) -> str:
    """Name, memory, link and driver, as far as known."""
    words = [gpu.name]
    if gpu.total_bytes is not None:
        others = gpu.used_by_others_bytes or 0
        taken = f" ({others / _GIB:.1f} GiB used by other programs)" if others > _GIB / 4 else ""
        words.append(f"{gpu.total_bytes / _GIB:.0f} GiB{taken}")
    if gpu.pcie_generation is not None:
        lanes = gpu.pcie_width_now or gpu.pcie_width
        words.append(f"PCIe {gpu.pcie_generation}.0" + (f" x{lanes}" if lanes else ""))
    if not gpu.is_integrated:
        words.append(f"driver {gpu.driver or 'unknown'}")
    return ", ".join(words)


def _converted_findings() -> list[Finding]:
    """What was converted of models, and what of it nothing needs any more."""
    from engine.checkpoint.library import converted_dir, leftovers

    with contextlib.suppress(OSError):
        nbytes = sum(file.stat().st_size for file in converted_dir().iterdir() if file.is_file())
        left = sum(file.stat().st_size for file in leftovers())
        if left:
            said = f"{about(left)} of converted weights that no model here needs any more."
            return [Finding("converted weights", Status.ADVICE, said, "The next model that is loaded removes them.")]
        if nbytes:
            said = f"{about(nbytes)}; each goes with its model, or alone: Models, on this PC, the model's menu."
            return [Finding("converted weights", Status.OK, said)]
    return []


def folder_findings(hardware: Probe) -> list[Finding]:
    """Whether our folders are writable, free space, and whether the starter model is there."""
    findings = [
        _folder_finding(name, folder)
        for name, folder in (
            ("settings folder", config_dir()),
            ("data folder", data_dir()),
            ("cache folder", cache_dir()),
            ("log folder", log_dir()),
        )
    ]
    free = hardware.models_disk_free_bytes
    kind = _DISKS.get(hardware.models_disk.kind, "") if hardware.models_disk else ""
    if free is None:
        findings.append(Finding("disk", Status.ADVICE, "The free space could not be determined."))
    elif free < 2 * _GIB:
        detail = f"{free / _GIB:.1f} GiB free where models are kept ({models_dir()})."
        findings.append(Finding("disk", Status.ADVICE, detail, "Free some space before adding a model."))
    else:
        findings.append(Finding("disk", Status.OK, f"{free / _GIB:.0f} GiB free where models are kept{kind}."))
    findings += _converted_findings()
    if starter_is_built():
        findings.append(Finding("starter model", Status.OK, f"in {models_dir()}"))
    else:
        action = "Run `switchyard models pull starter`."
        findings.append(Finding("starter model", Status.ADVICE, "It is not on this machine yet.", action))
    return findings


def measurement_findings(hardware: Probe) -> list[Finding]:
    """Whether this machine's measurements are up to date; nothing if it was never measured."""
    device = hardware.card_device
    if (known := load_measurements(hardware, device)) is not None:
        detail = " ".join((f"{known.kind}, on {known.taken_at[:10]}.", *known.notes))
        return [Finding("measurements", Status.OK, detail)]
    if changed := changes(hardware, device):
        return [Finding("measurements", Status.ADVICE, " ".join(changed), "Run `switchyard tune` again.")]
    return []


def torch_cuda_version() -> str | None:
    """The CUDA version of the installed torch, read from its files; None for a build without CUDA."""
    return _torch_built_for("cuda")


def torch_hip_version() -> str | None:
    """The same for ROCm."""
    return _torch_built_for("hip")


def torch_xpu_version() -> str | None:
    """The same for Intel's cards: the version of SYCL."""
    return _torch_built_for("xpu")


def _torch_built_for(toolkit: str) -> str | None:
    try:
        path = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
        match = re.search(rf"^{toolkit}\b[^=\n]*= *'([\d.]+)[^']*'", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return match[1] if match else None


def _installed(distribution: str) -> str | None:
    packed, engine = bundle(), current_engine()
    where = [str(window_folder()), *([str(engine.folder)] if engine is not None else [])] if packed else sys.path
    return next((found.version for found in importlib.metadata.distributions(name=distribution, path=where)), None)


def _capability(text: str | None) -> tuple[int, int]:
    major, _, minor = (text or "").partition(".")
    # Assume that torch has kernels for an unknown one: the proof shows it.
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (7, 5)


def _folder_finding(name: str, folder: Path) -> Finding:
    """Checks that the folder is writable, without creating it."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        action = "Fix its permissions, or point SWITCHYARD_HOME at a folder that can be written."
        return Finding(name, Status.PROBLEM, f"{folder} cannot be written ({reason}).", action)
    if free_disk_bytes(folder) == 0:
        return Finding(name, Status.PROBLEM, f"The disk of {folder} is full.", "Free some space.")
    return Finding(name, Status.OK, str(folder))
