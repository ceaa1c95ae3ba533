"""What `doctor` finds out about software, graphics card and folders."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.checkpoint.library import starter_is_built
from engine.hardware.probe import HardwareProfile, free_disk_bytes
from engine.paths import cache_dir, config_dir, data_dir, log_dir, models_dir

_REINSTALL = "Run `python3 installers/start.py` in the checkout again."
_OLDEST_CAPABILITY = (7, 5)
"""What builds of torch for CUDA 13 still run on: Turing."""
_GIB = 2**30


class Status(StrEnum):
    """How bad it is: `PROBLEM` keeps Switchyard from working, `ADVICE` does not."""

    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what it is like, and what to do if that is not as it should be."""

    name: str
    status: Status
    detail: str
    action: str = ""


def software_findings() -> list[Finding]:
    """Python and the packages that everything stands on, from their metadata: none of them is imported."""
    findings = [Finding("Python", Status.OK, f"{platform.python_version()} ({sys.executable})")]
    for name, distribution in (
        ("torch", "torch"),
        ("transformers", "transformers"),
        ("PySide6", "PySide6-Essentials"),
    ):
        version = _installed(distribution)
        if version is None:
            findings.append(Finding(name, Status.PROBLEM, f"{name} is not installed.", _REINSTALL))
        elif name == "transformers" and not version.startswith("5.23."):
            detail = f"{version}, but Switchyard needs 5.23, whose loading it builds on."
            findings.append(Finding(name, Status.PROBLEM, detail, _REINSTALL))
        else:
            findings.append(Finding(name, Status.OK, version))
    return findings


def gpu_findings(hardware: HardwareProfile) -> list[Finding]:
    """The graphics cards, and whether the installed torch can use them."""
    if not hardware.gpus:
        return [Finding("graphics card", Status.OK, f"{hardware.gpu_note} Models run on the processor.")]
    findings = []
    cuda = torch_cuda_version()
    for gpu in hardware.gpus:
        memory = "" if gpu.total_bytes is None else f", {gpu.total_bytes / _GIB:.0f} GiB"
        detail = f"{gpu.name}{memory}, driver {gpu.driver or 'unknown'}"
        if cuda is None:
            detail += "; the installed torch was built without CUDA, so the card is not used."
            findings.append(Finding("graphics card", Status.ADVICE, detail, _REINSTALL))
        elif _capability(gpu.compute_capability) < _OLDEST_CAPABILITY:
            detail += f"; torch for CUDA {cuda} no longer runs on cards this old (capability {gpu.compute_capability})."
            action = "Use --device cpu, or install a torch built for an older CUDA."
            findings.append(Finding("graphics card", Status.ADVICE, detail, action))
        else:
            findings.append(Finding("graphics card", Status.OK, f"{detail}; torch is built for CUDA {cuda}."))
    return findings


def folder_findings(hardware: HardwareProfile) -> list[Finding]:
    """Whether our folders can be written, how much fits, and whether the starter model is there."""
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
    if free is None:
        findings.append(Finding("disk", Status.ADVICE, "How much space is free could not be read."))
    elif free < 2 * _GIB:
        detail = f"{free / _GIB:.1f} GiB free where models are kept ({models_dir()})."
        findings.append(Finding("disk", Status.ADVICE, detail, "Free some space before adding a model."))
    else:
        findings.append(Finding("disk", Status.OK, f"{free / _GIB:.0f} GiB free where models are kept."))
    if starter_is_built():
        findings.append(Finding("starter model", Status.OK, f"in {models_dir()}"))
    else:
        action = "Run `switchyard models pull starter`."
        findings.append(Finding("starter model", Status.ADVICE, "It is not on this machine yet.", action))
    return findings


def torch_cuda_version() -> str | None:
    """The CUDA version that the installed torch was built for, read from its files; None for a build without."""
    try:
        path = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
        match = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return None
    return match[1] if match else None


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _capability(text: str | None) -> tuple[int, int]:
    major, _, minor = (text or "").partition(".")
    # An unknown one is taken to be new enough: loading a model will tell.
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (99, 0)


def _folder_finding(name: str, folder: Path) -> Finding:
    """Try to write, without making the folder: that is for whoever first has something to keep there."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        action = "Mend its permissions, or point SWITCHYARD_HOME at a folder that can be written."
        return Finding(name, Status.PROBLEM, f"{folder} cannot be written ({reason}).", action)
    if free_disk_bytes(folder) == 0:
        return Finding(name, Status.PROBLEM, f"The disk of {folder} is full.", "Free some space.")
    return Finding(name, Status.OK, str(folder))
