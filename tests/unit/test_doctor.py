"""What `switchyard doctor` finds, and when that is a reason to exit 2."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.common import installed
from engine.common.installed import note_files
from engine.common.paths import python_module
from engine.devices.card_proof import CardProof
from engine.hardware import torch_builds
from engine.hardware.cpu import CpuInfo
from engine.hardware.measured import Measurements, described, save_measurements
from engine.hardware.probe import GpuInfo, Probe, Vendor, probe
from engine.hardware.surroundings import Surroundings
from engine.verbs import doctor
from engine.verbs.doctor import Finding, Status
from tests.bundles import make_bundle, make_part

GPU = GpuInfo("NVIDIA H200", 140 * 2**30, 139 * 2**30, "580.65", "9.0", 5)


@pytest.fixture
def machine() -> Probe:
    return replace(probe(), gpus=(), gpu_note="None here.", ram_available_bytes=2**34, models_disk_free_bytes=2**40)


def test_here_it_tells_everything_and_makes_no_folder(
    switchyard_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if document["healthy"] else 2)
    names = {finding["name"] for finding in document["findings"]}
    assert {"system", "processor", "memory", "Python", "torch", "transformers", "PySide6", "graphics card"} <= names
    assert {"display", "data folder", "disk", "starter model"} <= names
    assert all(finding["action"] for finding in document["findings"] if finding["status"] == "problem")
    assert document["hardware"]["usable_cpus"] >= 1
    made = {path.name for path in switchyard_home.rglob("*")} if switchyard_home.exists() else set()
    assert made <= {"logs"}


@pytest.mark.usefixtures("without_kernels")
def test_for_a_person_every_finding_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor"])
    said = capsys.readouterr().out
    assert "starter model" in said
    assert "-> Run `switchyard models pull starter`." in said


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.skipif(sys.platform == "win32", reason="a folder's permissions")
def test_a_folder_that_cannot_be_used_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Probe, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("SWITCHYARD_HOME", str(in_the_way))
    findings = [finding for finding in doctor.folder_findings(machine) if finding.status == Status.PROBLEM]
    assert {finding.name for finding in findings} == {
        "settings folder", "data folder", "cache folder", "log folder",
    }  # fmt: skip
    assert all("SWITCHYARD_HOME" in finding.action for finding in findings)
    assert cli.main(["doctor"]) == 2
    assert "PROBLEM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpu", "cuda", "status", "words"),
    [
        (GPU, "13.0", Status.OK, "built for CUDA 13.0"),
        (GPU, None, Status.ADVICE, "built without CUDA"),
        (replace(GPU, compute_capability="6.1"), "13.0", Status.ADVICE, "this old"),
        (replace(GPU, compute_capability="6.1"), "12.6", Status.OK, "built for CUDA 12.6"),
        (replace(GPU, compute_capability="12.0"), "12.6", Status.ADVICE, "this new"),
        (replace(GPU, compute_capability=None, total_bytes=None, driver=None), "13.0", Status.OK, "unknown"),
    ],
)
def test_a_graphics_card_and_the_torch_beside_it(
    monkeypatch: pytest.MonkeyPatch,
    machine: Probe,
    gpu: GpuInfo,
    cuda: str | None,
    status: Status,
    words: str,
) -> None:
    monkeypatch.setattr(doctor, "torch_cuda_version", lambda: cuda)
    (finding,) = doctor.gpu_findings(replace(machine, gpus=(gpu,), gpu_note=""))
    assert finding.status == status
    assert words in finding.detail
    assert bool(finding.action) == (status != Status.OK)


RADEON = replace(GPU, name="AMD Radeon RX 7900 XTX", vendor=Vendor.AMD, driver="amdgpu", compute_capability=None)
GRAPHICS = GpuInfo("Intel UHD Graphics", None, None, "i915", None, None, vendor=Vendor.INTEL, is_integrated=True)


@pytest.mark.parametrize(("hip", "status", "words"), [("7.2", Status.OK, "for ROCm"), (None, Status.ADVICE, "without")])
def test_an_amd_card(
    monkeypatch: pytest.MonkeyPatch, machine: Probe, hip: str | None, status: Status, words: str
) -> None:
    monkeypatch.setattr(doctor, "torch_hip_version", lambda: hip)
    (finding,) = doctor.gpu_findings(replace(machine, gpus=(RADEON,), gpu_note=""))
    assert (finding.status, words in finding.detail) == (status, True)


@pytest.mark.parametrize(
    ("xpu", "status", "words"), [("20250302", Status.OK, "for XPU"), (None, Status.ADVICE, "without")]
)
def test_an_intel_card(
    monkeypatch: pytest.MonkeyPatch, machine: Probe, xpu: str | None, status: Status, words: str
) -> None:
    monkeypatch.setattr(doctor, "torch_xpu_version", lambda: xpu)
    arc = replace(RADEON, name="Intel Arc B580", vendor=Vendor.INTEL, driver="xe")
    with_card = replace(machine, gpus=(arc,), gpu_note="")
    (finding,) = doctor.gpu_findings(with_card)
    assert (finding.status, words in finding.detail) == (status, True)
    assert with_card.card_device == "xpu:0"


def test_apples_graphics_are_used_by_name(machine: Probe) -> None:
    apple = replace(GRAPHICS, name="Apple graphics", vendor=Vendor.APPLE, driver="macOS 26.0")
    first, _ = doctor.gpu_findings(replace(machine, gpus=(apple,), gpu_note=""))
    assert first.status is Status.OK
    assert "`--device mps`" in first.detail
    assert "nobody has tried" in first.detail


def test_graphics_of_the_processor_are_no_card(machine: Probe) -> None:
    first, second = doctor.gpu_findings(replace(machine, gpus=(GRAPHICS,), gpu_note=""))
    assert "do not run" in first.detail
    assert "CPU" in second.detail
    assert first.status == second.status == Status.OK


def test_a_broken_driver_beside_another_card_is_worth_advice(monkeypatch: pytest.MonkeyPatch, machine: Probe) -> None:
    monkeypatch.setattr(doctor, "torch_hip_version", lambda: "7.2")
    _, second = doctor.gpu_findings(replace(machine, gpus=(RADEON,), gpu_note="Restart."))
    assert (second.status, second.detail) == (Status.ADVICE, "Restart.")


@pytest.mark.parametrize(
    ("proofs", "status", "said"),
    [
        ([CardProof("RTX 4090")], Status.OK, "tested on RTX 4090"),
        ([CardProof("RTX 4090"), CardProof("GTX 1080", "too old")], Status.ADVICE, "GTX 1080: too old."),
        ([], Status.ADVICE, "no card"),
        (None, Status.ADVICE, "ended"),
    ],
)
def test_a_card_is_tried(
    monkeypatch: pytest.MonkeyPatch, machine: Probe, proofs: list[CardProof] | None, status: Status, said: str
) -> None:
    monkeypatch.setattr(doctor, "prove_cards", lambda: proofs)
    monkeypatch.setattr(doctor, "torch_cuda_version", lambda: "13.0")
    (finding,) = doctor.proof_findings(replace(machine, gpus=(GPU,), gpu_note=""))
    assert (finding.status, said in finding.detail) == (status, True)
    assert bool(finding.action) == (status != Status.OK)
    monkeypatch.setattr(doctor, "torch_cuda_version", lambda: None)
    monkeypatch.setattr(doctor, "torch_hip_version", lambda: None)
    assert doctor.proof_findings(replace(machine, gpus=(GPU,), gpu_note="")) == []


CHOICE = "For NVIDIA H200 with driver 580.65."


@pytest.mark.parametrize(
    ("cuda", "choice", "status", "said"),
    [
        ("13.0", torch_builds.Choice(torch_builds.CUDA_130, CHOICE), Status.OK, f"CUDA 13.0. {CHOICE}"),
        (None, torch_builds.Choice(torch_builds.CUDA_130, CHOICE), Status.ADVICE, "CPU, but CUDA 13.0 is the one"),
        ("12.8", torch_builds.Choice(torch_builds.CUDA_130, CHOICE), Status.ADVICE, "CUDA 12.8, but CUDA 13.0 is the"),
        (None, torch_builds.Choice(torch_builds.CPU, "It needs driver 580."), Status.ADVICE, "CPU. It needs driver"),
        (None, torch_builds.Choice(torch_builds.CPU, "You ask for it.", is_asked=True), Status.OK, "CPU. You ask"),
        ("13.0", torch_builds.Choice(torch_builds.CPU), Status.ADVICE, "No graphics card was found"),
        (None, torch_builds.Choice(torch_builds.CPU), None, ""),
    ],
)
def test_which_build_of_torch_is_right_and_why(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, choice: torch_builds.Choice, status: Status | None, said: str
) -> None:
    monkeypatch.setattr(doctor, "torch_cuda_version", lambda: cuda)
    monkeypatch.setattr(doctor, "torch_hip_version", lambda: None)
    monkeypatch.setattr(doctor, "torch_xpu_version", lambda: None)
    monkeypatch.setattr(torch_builds, "chosen", lambda: choice)
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    findings = doctor.build_findings()
    assert [finding.status for finding in findings] == ([] if status is None else [status])
    assert all(said in finding.detail for finding in findings)


def test_a_variable_that_may_hide_the_card_is_named(monkeypatch: pytest.MonkeyPatch, machine: Probe) -> None:
    monkeypatch.setattr(doctor, "prove_cards", list)
    monkeypatch.setattr(doctor, "torch_cuda_version", lambda: "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (finding,) = doctor.proof_findings(replace(machine, gpus=(GPU,), gpu_note=""))
    assert finding.action.startswith("CUDA_VISIBLE_DEVICES is '-1'")


def test_two_kinds_of_cores_and_limits(machine: Probe) -> None:
    limited = replace(
        machine,
        processor=CpuInfo("i9", 24, 32, performance_cores=8, efficiency_cores=16),
        where=Surroundings(None, True, 2**33, 2.0),
    )
    found = {finding.name: finding.detail for finding in doctor.hardware_findings(limited)}
    assert all(kind in found["processor"] for kind in ("8 performance", "16 efficiency"))
    assert "container" in found["memory"]
    inside = replace(machine, where=Surroundings(2, True, None, None))
    assert "WSL" in {finding.name: finding.detail for finding in doctor.hardware_findings(inside)}["memory"]


def test_measurements_are_said_and_so_is_a_changed_machine(machine: Probe) -> None:
    assert doctor.measurement_findings(machine) == []
    save_measurements(Measurements("quick", "", 0, described(machine), "2026-11-21T06:00:00+00:00", notes=("Hot.",)))
    (finding,) = doctor.measurement_findings(machine)
    assert (finding.status, finding.detail) == (Status.OK, "quick, on 2026-11-21. Hot.")
    (finding,) = doctor.measurement_findings(replace(machine, ram_bytes=2**40))
    assert finding.status == Status.ADVICE
    assert "The RAM was" in finding.detail


def test_without_a_card_it_says_why(machine: Probe) -> None:
    (finding,) = doctor.gpu_findings(machine)
    assert "None here." in finding.detail
    assert finding.status == Status.OK


def test_a_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", {"transformers": "4.57.1", "torch": "2.13.0"}.get)
    found = {finding.name: finding.status for finding in doctor.software_findings()}
    assert found == {
        "Python": Status.OK,
        "torch": Status.OK,
        "transformers": Status.PROBLEM,
        "PySide6": Status.PROBLEM,
    }


def test_an_engine_that_is_missing_or_has_lost_files_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(make_bundle(tmp_path / "program")))

    def said() -> str:
        found = [finding for finding in doctor.software_findings() if finding.name == "engine"]
        assert all(finding.status is Status.PROBLEM and "first page fetches it" in finding.action for finding in found)
        return "".join(finding.detail for finding in found)

    assert said() == "It is not on this computer yet."
    part = make_part("engine-0.2.0-cpu")
    (part / "torch.so").write_text("here")
    note_files(part)
    assert said() == ""
    (part / "torch.so").unlink()
    assert said() == "The engine has lost files since it was installed (torch.so), perhaps to a virus scanner."
    assert installed.needs_engine()


def test_torchs_build_is_read_from_its_files() -> None:
    import torch

    assert doctor.torch_cuda_version() == torch.version.cuda


@pytest.mark.parametrize(
    ("ram", "disk", "names"), [(2**28, 2**40, {"memory"}), (2**34, 2**20, {"disk"}), (2**34, None, {"disk"})]
)
def test_little_room_is_worth_advice(machine: Probe, ram: int, disk: int | None, names: set[str]) -> None:
    small = replace(machine, ram_available_bytes=ram, models_disk_free_bytes=disk)
    findings = [*doctor.hardware_findings(small), *doctor.folder_findings(small)]
    advised = {finding.name for finding in findings if finding.status == Status.ADVICE}
    assert advised - {"starter model"} == names


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Qt brings all it needs")
@pytest.mark.parametrize(("display", "status"), [(":0", Status.PROBLEM), ("", Status.ADVICE)])
def test_missing_libraries_are_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, display: str, status: Status
) -> None:
    for name in ("WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr(doctor, "missing_qt_libraries", lambda: ["libxcb-cursor.so.0", "libEGL.so.1"])
    shown, libraries = doctor.display_findings()
    assert (shown.status == Status.OK) == bool(display)
    assert libraries.status == status
    assert "sudo apt-get install libxcb-cursor0 libegl1" in libraries.action


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
