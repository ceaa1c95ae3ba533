"""What `doctor` says of the native kernels."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.common.paths import python_module
from engine.hardware.probe import Probe, probe
from engine.verbs import doctor
from engine.verbs.doctor import Finding, Status


def told(monkeypatch: pytest.MonkeyPatch, script: str, hardware: Probe | None = None) -> Finding:
    """The finding, where the child is this script."""
    command = [sys.executable, "-I", "-S", "-c", script]
    monkeypatch.setattr(doctor, "python_module", lambda _module: (command, {}))
    (finding,) = doctor.kernel_findings(hardware or probe())
    return finding


def saying(**document: Any) -> str:
    return f"print({json.dumps(document)!r})"


def test_the_instructions_and_threads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = told(monkeypatch, saying(isa="AVX512_VNNI", note=""))
    assert finding.status is Status.OK
    assert finding.detail.startswith("AVX-512 with VNNI, on ")
    assert "thread" in finding.detail
    assert not finding.action


def test_why_there_are_none_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    note = "The fast CPU kernels are not there, so it is slower: install a C++ compiler and run the set-up again."
    finding = told(monkeypatch, saying(isa=None, note=note))
    assert finding.status is Status.ADVICE
    assert finding.detail == "The fast CPU kernels are not there, so it is slower."
    assert finding.action == "Install a C++ compiler and run the set-up again."
    assert "SWITCHYARD_NATIVE" in told(monkeypatch, saying(isa=None, note="")).detail


@pytest.mark.parametrize("script", ["", "print('nonsense')", "print('[]')", "raise SystemExit(3)", "print('{}')"])
def test_a_child_that_fails_is_advice(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    finding = told(monkeypatch, script)
    assert finding.status is Status.ADVICE
    assert finding.action


def test_what_the_kernels_say_themselves() -> None:
    command, variables = python_module("engine.kernels.native")
    said = subprocess.run(
        [*command, "--status"], capture_output=True, check=True, timeout=120, env=os.environ | variables
    )
    document = json.loads(said.stdout)
    assert bool(document["isa"]) != bool(document["note"])


def test_a_processor_without_avx2_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(probe(), architecture="x86_64")
    old, new = replace(here, instructions=("sse4_2", "avx")), replace(here, instructions=("sse4_2", "avx", "avx2"))
    finding = told(monkeypatch, saying(isa="PORTABLE", note=""), old)
    assert finding.status is Status.ADVICE
    assert "plain C++ without vector instructions" in finding.detail
    assert "has no AVX2: everything works" in finding.detail
    for hardware in (new, replace(old, architecture="arm64"), replace(old, instructions=())):
        finding = told(monkeypatch, saying(isa="PORTABLE", note=""), hardware)
        assert finding.status is Status.OK  # somebody wants these kernels
        assert "AVX2" not in finding.detail


@pytest.mark.exhaustive
def test_the_portable_kernels_answer(tmp_path: Path) -> None:
    """All that the self-test of an installed engine does, with the kernels for old processors."""
    command, variables = python_module("engine.self_test")
    own = {"SWITCHYARD_ISA": "portable", "SWITCHYARD_HOME": str(tmp_path)}
    done = subprocess.run(command, env=os.environ | variables | own, capture_output=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["problem"], said["kernels"]) == ("", "PORTABLE")
    assert said["answered"] > 0
