"""`switchyard doctor`: what was detected, what is missing, how to fix it.

Exits with 2 if Switchyard cannot answer at all, or cannot open a window although there is a display; otherwise with 0,
whatever it advises. Imports neither torch nor Qt: it must work where they do not.

One file about this installation, for people to attach to a report of a fault.

It has versions, hardware, what `doctor` finds, crash reports and the end of the logs: no prompts and answers, no names
of people, computers and models, no tokens, and no paths of the user's own.  Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.common import installed
from engine.common.anonymous import of_log, without_names
from engine.common.files import disk_errors_explained, write_whole
from engine.common.paths import log_dir, python_module
from engine.common.settings import SettingsFile, kept_settings, read_settings, said, settings_path
from engine.hardware.measured import described
from engine.hardware.probe import Probe, probe
from engine.hardware.surroundings import DISPLAY_VARIABLES, has_display
from engine.tuning.saved_results import all_results, day, machine_changes
from engine.verbs.doctor_checks import (
    Finding,
    Status,
    build_findings,
    folder_findings,
    gpu_findings,
    measurement_findings,
    proof_findings,
    reinstall,
    software_findings,
)
from engine.verbs.output import emit, note

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
_GIB = 2**30


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
    """Findings about the machine."""
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
    mark = {Status.OK: "ok", Status.ADVICE: "note", Status.PROBLEM: "PROBLEM"}[finding.status]
    if finding.name in _NAMES_MODELS:
        return [f"{mark:>7}  {finding.name}"]
    lines = [f"{mark:>7}  {finding.name}: {without_names(finding.detail)}"]
    return lines if not finding.action else [*lines, f"{'':>7}  -> {without_names(finding.action)}"]


def _flat(value: Any, name: str = "") -> Iterable[str]:
    """A line for each value inside."""
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
