"""`switchyard doctor`: what was detected, what is missing, how to fix it.

Exits with 2 if Switchyard cannot answer at all, or cannot open a window although there is a display; otherwise with 0,
whatever it advises. Imports neither torch nor Qt: it must work where they do not.

One file about this installation, for people to attach to a report of a fault.

It has versions, hardware, what `doctor` finds, crash reports and the end of the logs: no prompts and answers, no names
of people, computers and models, no tokens, and no paths of the user's own.  Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.checkpoint.library import starter_is_built
from engine.common import installed
from engine.common.anonymous import of_log, without_names
from engine.common.files import disk_errors_explained, write_whole
from engine.common.installed import bundle, current_engine, give_up_damaged, version, window_folder
from engine.common.paths import cache_dir, config_dir, data_dir, log_dir, models_dir, python_module
from engine.common.settings import SettingsFile, kept_settings, read_settings, said, settings_path
from engine.common.sizes import about
from engine.devices.card_proof import prove_cards
from engine.families.library import RELEASE
from engine.hardware import torch_builds
from engine.hardware.disk import DiskKind
from engine.hardware.gpu_info import HIDING
from engine.hardware.measured import changes, described, load_measurements
from engine.hardware.probe import GpuInfo, Probe, Vendor, free_disk_bytes, probe
from engine.hardware.surroundings import DISPLAY_VARIABLES, has_display
from engine.tuning.result import day
from engine.tuning.saved_results import all_results, machine_changes
from engine.verbs.output import emit, note

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
    if gpu.vendor is not Vendor.NVIDIA:
        built, toolkit, action = (
            (torch_xpu_version(), "XPU", "It chooses torch's build for Arc cards.")
            if gpu.vendor is Vendor.INTEL
            else (torch_hip_version(), "ROCm", "On Linux it chooses torch's build for ROCm.")
        )
        if built is not None:
            return Finding("graphics card", Status.OK, f"{detail}; torch is built for {toolkit}.")
        detail += f"; the installed torch was built without {toolkit}, so the card is not used."
        return Finding("graphics card", Status.ADVICE, detail, f"{reinstall()} {action}")
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


# System libraries that Qt needs (`readelf -d` of libQt6Gui, libQt6XcbQpa, libqxcb), and Debian's packages.
_QT_SYSTEM_LIBRARIES = {
    "libEGL.so.1": "libegl1",
    "libGL.so.1": "libgl1",
    "libX11-xcb.so.1": "libx11-xcb1",
    "libdbus-1.so.3": "libdbus-1-3",
    "libfontconfig.so.1": "libfontconfig1",
    "libfreetype.so.6": "libfreetype6",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libxcb-cursor.so.0": "libxcb-cursor0",
    "libxcb-icccm.so.4": "libxcb-icccm4",
    "libxcb-image.so.0": "libxcb-image0",
    "libxcb-keysyms.so.1": "libxcb-keysyms1",
    "libxcb-randr.so.0": "libxcb-randr0",
    "libxcb-render-util.so.0": "libxcb-render-util0",
    "libxcb-shape.so.0": "libxcb-shape0",
    "libxcb-util.so.1": "libxcb-util1",
    "libxcb-xkb.so.1": "libxcb-xkb1",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libxkbcommon-x11.so.0": "libxkbcommon-x11-0",
}


def display_findings() -> list[Finding]:
    """Whether there is a display, and on Linux whether Qt's system libraries are installed."""
    if sys.platform != "linux":
        return [Finding("display", Status.OK, "the desktop's own")]
    shown = has_display()
    findings = [_display_finding(shown)]
    missing = missing_qt_libraries()
    if missing:
        packages = " ".join(dict.fromkeys(_QT_SYSTEM_LIBRARIES[library] for library in missing))
        findings.append(
            Finding(
                "window libraries",
                # Without a display there is no window that needs them.
                Status.PROBLEM if shown else Status.ADVICE,
                f"Qt needs {', '.join(missing)}, which cannot be loaded.",
                f"On Debian or Ubuntu: `sudo apt-get install {packages}`.",
            )
        )
    else:
        findings.append(Finding("window libraries", Status.OK, "all system libraries for Qt are there"))
    return findings


def missing_qt_libraries() -> list[str]:
    """System libraries that Qt needs for a window but that cannot be loaded."""
    missing = []
    for library in _QT_SYSTEM_LIBRARIES:
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(library)
    return missing


def _display_finding(shown: bool) -> Finding:
    if shown:
        names = [name for name in DISPLAY_VARIABLES if os.environ.get(name)]
        return Finding("display", Status.OK, ", ".join(f"{name}={os.environ[name]}" for name in names))
    return Finding(
        "display",
        Status.ADVICE,
        "Neither DISPLAY nor WAYLAND_DISPLAY is set: no window can open here.",
        "Use `switchyard chat`, or log in to a desktop.",
    )


_NAME = "CPU kernels"
_SECONDS = 120.0
"""Time for the first self-test on a machine, with torch on a slow disk."""
_CALLED = {
    "PORTABLE": "plain C++ without vector instructions",
    "AVX2": "AVX2",
    "AVX_VNNI": "AVX2 and AVX-VNNI",
    "AVX512": "AVX-512",
    "AVX512_VNNI": "AVX-512 with VNNI",
    "AVX512_BF16": "AVX-512 with VNNI and BF16",
    "AMX": "AVX-512 with VNNI and BF16, and AMX",
    "NEON": "NEON",
    "NEON_DOT": "NEON with dot products",
    "NEON_I8MM": "NEON with dot products and products of matrices of bytes",
}


def kernel_findings(hardware: Probe) -> list[Finding]:
    """The instructions and threads that the native kernels use here, or why there are none."""
    command, variables = python_module("engine.kernels.native")
    try:
        child = subprocess.run(
            [*command, "--status"], capture_output=True, timeout=_SECONDS, check=True, env=os.environ | variables
        )
        found = json.loads(child.stdout)
        isa, note, faster = found["isa"], str(found["note"]), found.get("faster")
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        detail = "The fast CPU kernels could not be checked."
        return [Finding(_NAME, Status.ADVICE, detail, reinstall())]
    if isa is None:
        detail, _, action = note.rpartition(": ")
        detail = f"{detail}." if detail else "Disabled by SWITCHYARD_NATIVE=0; PyTorch's operators are used."
        return [Finding(_NAME, Status.ADVICE, detail, f"{action[:1].upper()}{action[1:]}")]
    threads = max(1, min(hardware.physical_cores or 1, hardware.usable_cpus))
    on = f"{threads} threads" if threads > 1 else "1 thread"
    detail = f"{_CALLED.get(isa, isa)}, on {on}; tested on this CPU.{_measured(faster)}"
    if isa == "PORTABLE" and hardware.lacks_avx2:
        slow = f"{detail} This processor has no AVX2: everything works, but answers take several times as long."
        return [Finding(_NAME, Status.ADVICE, slow, "Choose small models, or use a computer of 2014 or newer.")]
    return [Finding(_NAME, Status.OK, detail)]


def _measured(faster: list[list[str]] | None) -> str:
    """What was measured of older instructions: `None` if nothing was."""
    if faster is None:
        return ""
    if not faster:
        return " Older instructions were measured, and none is clearly faster."
    exceptions = ", ".join(f"{_CALLED.get(isa, isa)} for {work}" for work, isa in faster)
    return f" Measured to be faster and used: {exceptions}."


_SHOWN = 3


def tuning_findings(hardware: Probe) -> list[Finding]:
    """The models tuned on this machine; advice if there are none, or the machine has changed."""
    results = [one for one in all_results() if one.won is not None]
    if not results:
        action = "Run `switchyard tune --model M` for the model you use."
        return [Finding("tuning", Status.ADVICE, "No model has been tuned on this machine yet.", action)]
    now = described(hardware)
    here = [one for one in results if not machine_changes(one, now)]
    if not here:
        changed = machine_changes(results[0], now)[0]
        return [Finding("tuning", Status.ADVICE, f"It is out of date: {changed}", "Run `switchyard tune` again.")]
    latest = {one.model: one for one in reversed(here)}
    doubtful = next((one for one in latest.values() if not one.is_trusted), None)
    if doubtful is not None:
        why = (
            f"has since run at {doubtful.outrun:.1f} tokens/s, much faster than what was timed"
            if doubtful.outrun
            else f"was tuned while other programs used {doubtful.others:.0%} of the CPU"
        )
        return [Finding("tuning", Status.ADVICE, f"{doubtful.model} {why}.", "Run `switchyard tune` again.")]
    said = [
        f"{name} at {one.won.tokens_per_s:.1f} tokens/s on {day(one.taken_at)}"
        for name, one in list(latest.items())[-_SHOWN:]
        if one.won is not None
    ]
    more = f" and {len(latest) - _SHOWN} more" if len(latest) > _SHOWN else ""
    return [Finding("tuning", Status.OK, "; ".join(said) + more)]


def settings_findings() -> list[Finding]:
    """What people have changed in the settings, without what names things of theirs."""
    path = settings_path()
    try:
        file = read_settings(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is damaged"
        return [
            Finding("settings", Status.ADVICE, f"{path} cannot be read ({why}).", "The window uses the usual ones.")
        ]
    changed = [
        f"{setting.key} {'(changed)' if setting.is_private else said(setting, value)}"
        for setting in kept_settings().values()
        if (setting.name or setting.option) and (value := file.value(setting)) != setting.default
    ]
    detail = ", ".join(changed) or "the usual ones"
    if file.odd:
        action = "The usual ones are used instead: change them in the window's Settings, or take them out of the file."
        return [Finding("settings", Status.ADVICE, f"{file.problem} The others: {detail}.", action)]
    return [Finding("settings", Status.OK, detail)]


def all_settings() -> dict[str, object]:
    """Every setting that is no private text, by key, for `--json`."""
    try:
        file = read_settings(settings_path())
    except (OSError, ValueError):
        file = SettingsFile()
    return {key: file.value(each) for key, each in kept_settings().items() if not each.is_private}


_MARKS = {Status.OK: "ok", Status.ADVICE: "note", Status.PROBLEM: "PROBLEM"}


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="what was detected, what is missing, how to fix it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write a file to attach to a report of a fault: no prompts, no names, nothing is sent",
    )


def run(args: argparse.Namespace) -> int:
    """Checks and reports; returns the exit code."""
    hardware = probe()
    findings = [
        *hardware_findings(hardware),
        *software_findings(),
        *kernel_findings(hardware),
        *gpu_findings(hardware),
        *build_findings(),
        *proof_findings(hardware),
        *measurement_findings(hardware),
        *tuning_findings(hardware),
        *settings_findings(),
        *display_findings(),
        *folder_findings(hardware),
    ]
    document = {
        "healthy": all(finding.status != Status.PROBLEM for finding in findings),
        "hardware": hardware,
        "findings": findings,
        "settings": all_settings(),
    }
    if args.report is not None:
        with disk_errors_explained(args.report.parent):
            write_whole(args.report, written_report(hardware, findings))
        note(f"The report is in {args.report}: read it before you pass it on.")
    emit(document, as_json=args.json, human=lambda: _report(findings))
    return 0 if document["healthy"] else 2


def hardware_findings(hardware: Probe) -> list[Finding]:
    vectors = ", ".join(hardware.instructions) or "not known"
    memory = f"{hardware.ram_available_bytes / _GIB:.1f} GiB free of {hardware.ram_bytes / _GIB:.1f} GiB"
    where = hardware.where
    if where is not None and where.memory_limit_bytes is not None:
        memory += ", the container's limit"
    elif where is not None and where.wsl:
        memory += ", the WSL limit (.wslconfig)"
    findings = [
        Finding("system", Status.OK, f"{hardware.os}, {hardware.architecture}"),
        Finding(
            "processor",
            Status.OK,
            f"{hardware.cpu or 'unknown model'}: {_cores(hardware)}, {hardware.usable_cpus} usable logical CPUs; "
            f"vector instructions: {vectors}",
        ),
    ]
    if hardware.ram_available_bytes < _GIB:
        advice = "Close other programs: even the starter model wants about 1 GiB."
        findings.append(Finding("memory", Status.ADVICE, memory, advice))
    else:
        findings.append(Finding("memory", Status.OK, memory))
    return findings


def _cores(hardware: Probe) -> str:
    processor = hardware.processor
    if processor is not None and processor.performance_cores and processor.efficiency_cores:
        return f"{processor.performance_cores} performance and {processor.efficiency_cores} efficiency cores"
    return f"{hardware.physical_cores or 'an unknown number of'} cores"


def _report(findings: Sequence[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.status]:>7}  {finding.name:<{width}}  {finding.detail}")
        if finding.action:
            lines.append(f"{'':>7}  {'':<{width}}  -> {finding.action}")
    return "\n".join(lines)


_LOGS = ("window.log", "engine.log", "engine-stderr.log", "command.log", "server.log")
_LAST_LINES, _READ_BYTES = 150, 256 * 1024
_CRASHES = ("crash-*.txt", "fault-*.txt")
_NAMES_MODELS = ("tuning", "measurements")
"""Findings whose details name models."""
_PACKAGES = (
    *("torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "numpy", "pyarrow", "psutil", "httpx2"),
    "PySide6-Essentials",
)


def written_report(hardware: Probe, findings: Sequence[Finding]) -> str:
    sections = {
        "Switchyard": _about(),
        "What was found": [line for finding in findings for line in _finding(finding)],
        "Hardware": [without_names(line) for line in _flat(asdict(hardware))],
        "Packages": _packages(),
        "Crashes": _crashes(),
        **{f"End of {name}": of_log(_end_of(log_dir() / name)) for name in _LOGS},
    }
    head = (
        "A report on an installation of Switchyard. It has no prompts, answers or names; read it before you pass it on."
    )
    blocks = [head]
    for title, lines in sections.items():
        blocks.append("\n".join([title, "-" * len(title), *(lines or ["(nothing)"])]))
    return "\n\n".join(blocks) + "\n"


def _about() -> list[str]:
    lines = [
        f"version {installed.version()}, written on {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"Python {platform.python_version()} ({platform.python_implementation()})",
        without_names(f"{platform.system()} {platform.release()}, {platform.machine()}"),
    ]
    packed = installed.bundle()
    if packed is None:
        return [*lines, "from a checkout or a Python environment"]
    engine, now = installed.current_engine(), installed.read_current()
    kept = ", ".join(f"{kind} {name or 'none'}" for kind, name in now.previous.items()) or "none"
    return [
        *lines,
        f"package {packed.packaged_as} {packed.version} for {packed.platform}",
        f"engine in use: {engine.name if engine is not None else 'none'}",
        f"window in use: {now.window or 'that of the package'}",
        f"before: {kept}",
        *([without_names(f"self-test: {engine.whole.proven}")] if engine is not None else []),
    ]


def _finding(finding: Finding) -> list[str]:
    mark = _MARKS[finding.status]
    if finding.name in _NAMES_MODELS:
        return [f"{mark:>7}  {finding.name}"]
    lines = [f"{mark:>7}  {finding.name}: {without_names(finding.detail)}"]
    return lines if not finding.action else [*lines, f"{'':>7}  -> {without_names(finding.action)}"]


def _flat(value: Any, name: str = "") -> Iterable[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
        for place, each in enumerate(value):
            yield from _flat(each, f"{name}[{place}]")
    elif value not in (None, "", (), []):
        yield f"{name}: {value}"


def _packages() -> list[str]:
    lines = []
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name}: not here")
    return lines


def _crashes() -> list[str]:
    lines = []
    for pattern in _CRASHES:
        for path in sorted(log_dir().glob(pattern)):
            text = [line for line in _end_of(path) if line.strip()]
            if pattern.startswith("crash") or any("Fatal" in line or "Windows fatal" in line for line in text):
                lines += [*text[:2], *of_log(text[2:])] if pattern.startswith("crash") else of_log(text)
    return [without_names(line) for line in lines]


def _end_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _READ_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return list(deque(text.splitlines(), maxlen=_LAST_LINES))
