"""`switchyard doctor`: what was detected, what is missing, how to fix it.

Exits with 2 if Switchyard cannot answer at all, or cannot open a window although there is a display; otherwise with 0,
whatever it advises. Imports neither torch nor Qt: it must work where they do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from engine.hardware.probe import Probe, probe
from engine.verbs.doctor_checks import (
    Finding,
    Status,
    folder_findings,
    gpu_findings,
    measurement_findings,
    software_findings,
)
from engine.verbs.doctor_display import display_findings
from engine.verbs.doctor_kernels import kernel_findings
from engine.verbs.doctor_tuning import tuning_findings
from engine.verbs.output import emit

_MARKS = {Status.OK: "ok", Status.ADVICE: "note", Status.PROBLEM: "PROBLEM"}
_GIB = 2**30


def add_parser(subparsers: Any) -> None:
    """Mount the verb."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="what was detected, what is missing, how to fix it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Checks and reports; returns the exit code."""
    hardware = probe()
    findings = [
        *hardware_findings(hardware),
        *software_findings(),
        *kernel_findings(hardware),
        *gpu_findings(hardware),
        *measurement_findings(hardware),
        *tuning_findings(hardware),
        *display_findings(),
        *folder_findings(hardware),
    ]
    document = {
        "healthy": all(finding.status != Status.PROBLEM for finding in findings),
        "hardware": hardware,
        "findings": findings,
    }
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
