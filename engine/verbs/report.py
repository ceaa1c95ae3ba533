"""One file about this installation, for people to attach to a report of a fault.

It has versions, hardware, what `doctor` finds, crash reports and the end of the logs: no prompts and answers, no names
of people, computers and models, no tokens, and no paths of the user's own.  Nothing is sent anywhere.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.common import installed
from engine.common.anonymous import of_log, without_names
from engine.common.paths import log_dir
from engine.hardware.probe import Probe
from engine.verbs.doctor_checks import Finding, Status

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
    """The report's text."""
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
