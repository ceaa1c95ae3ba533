"""`doctor`'s check of the native kernels, in a child process: it needs torch, which doctor must not import."""

from __future__ import annotations

import json
import os
import subprocess

from engine.common.paths import python_module
from engine.hardware.probe import Probe
from engine.verbs.doctor_checks import Finding, Status

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
}


def kernel_findings(hardware: Probe) -> list[Finding]:
    """The instructions and threads that the native kernels use here, or why there are none."""
    command, variables = python_module("engine.kernels.native")
    try:
        child = subprocess.run(
            [*command, "--status"], capture_output=True, timeout=_SECONDS, check=True, env=os.environ | variables
        )
        found = json.loads(child.stdout)
        isa, note = found["isa"], str(found["note"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        detail = "The fast CPU kernels could not be checked."
        return [Finding(_NAME, Status.ADVICE, detail, "Run `python3 installers/start.py` in the checkout again.")]
    if isa is None:
        detail, _, action = note.rpartition(": ")
        detail = f"{detail}." if detail else "Disabled by SWITCHYARD_NATIVE=0; PyTorch's operators are used."
        return [Finding(_NAME, Status.ADVICE, detail, f"{action[:1].upper()}{action[1:]}")]
    threads = max(1, min(hardware.physical_cores or 1, hardware.usable_cpus))
    on = f"{threads} threads" if threads > 1 else "1 thread"
    return [Finding(_NAME, Status.OK, f"{_CALLED.get(isa, isa)}, on {on}; tested on this CPU.")]
