"""Which build of PyTorch suits which cards and drivers."""

import ast
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.hardware import torch_builds


def test_it_is_read_by_old_pythons_and_needs_no_packages() -> None:
    """Set-up imports it before anything is installed."""
    source = Path(torch_builds.__file__)
    ast.parse(source.read_text(encoding="utf-8"), feature_version=(3, 8))
    alone = ["import sys", f"sys.path.append({str(source.parents[2])!r})", "import engine.hardware.torch_builds"]
    subprocess.run([sys.executable, "-I", "-S", "-c", "; ".join(alone)], check=True)


def nvidia(name: str, driver: str, *capability: int) -> torch_builds.NvidiaCard:
    return torch_builds.NvidiaCard(name, driver, (capability[0], capability[1]) if capability else None)


@pytest.mark.parametrize(
    ("cards", "label", "said"),
    [
        ([], "cpu", ""),
        ([nvidia("RTX 4090", "580.65.06", 8, 9)], "cu130", "RTX 4090"),
        ([nvidia("RTX 3060", "550.120", 8, 6)], "cu126", "driver 580"),
        ([nvidia("GTX 1080", "580.65", 6, 1)], "cu126", "no kernels"),
        ([nvidia("V100", "535.1", 7, 0)], "cu126", "no kernels"),
        ([nvidia("RTX 5090", "570.86", 12, 0)], "cpu", "update it"),
        ([nvidia("RTX 5090", "590.1", 12, 0)], "cu130", "RTX 5090"),
        ([nvidia("GTX 780", "470.2", 3, 5)], "cpu", "as old as"),
        ([nvidia("RTX 2060", "470.2", 7, 5)], "cpu", "driver 525"),
        ([nvidia("GTX 1080", "580.65", 6, 1), nvidia("RTX 5090", "580.65", 12, 0)], "cu130", "RTX 5090"),
        ([nvidia("GTX 780", "470.2", 3, 5), nvidia("GTX 1080", "580.65", 6, 1)], "cu126", "GTX 1080"),
        ([nvidia("the NVIDIA card", "")], "cu130", "unknown"),
        ([nvidia("old", "515.1")], "cpu", "update it"),
    ],
)
def test_the_build_for_nvidia_cards(cards: list[torch_builds.NvidiaCard], label: str, said: str) -> None:
    choice = torch_builds.choose("Linux", cards, [])
    assert choice.build.label == label
    assert said in choice.why


def test_the_build_for_amd_cards() -> None:
    def label(cards: list[str], system: str = "Linux", *, may: bool = True) -> tuple[str, str]:
        choice = torch_builds.choose(system, [], cards, can_open_kfd=may)
        return choice.build.label, choice.why

    assert label(["gfx1036", "gfx1100"]) == (
        "rocm7.2",
        "For an AMD card (gfx1100). No card of AMD's has been tried with Switchyard yet.",
    )
    assert label(["gfx1100"], "Windows")[0] == "cpu"
    assert label(["gfx1031"])[0] == "cpu"
    assert "gfx1031" in label(["gfx1031"])[1]
    assert "usermod" in label(["gfx1100"], may=False)[1]


@pytest.mark.parametrize(
    ("system", "amd", "label"),
    [("Linux", [], "xpu"), ("Windows", ["gfx1100"], "xpu"), ("Linux", ["gfx1100"], "rocm7.2"), ("Darwin", [], "cpu")],
)
def test_the_build_for_intel_cards(system: str, amd: list[str], label: str) -> None:
    assert torch_builds.choose(system, [], amd, ["e20b"]).build.label == label
    assert torch_builds.choose(system, [nvidia("RTX 4090", "580.65.06", 8, 9)], amd, ["e20b"]).build.label == "cu130"


def test_macs_have_one_build() -> None:
    choice = torch_builds.choose("Darwin", [], [])
    assert choice.build is torch_builds.CPU
    assert "`--device mps`" in choice.why


def test_intel_cards_with_memory_of_their_own(tmp_path: Path) -> None:
    numbers = {
        "0": ("0x8086", "0xE20B"),
        "1": ("0x8086", "0x4680"),
        "2": ("0x10de", "0x5600"),
        "3": ("0x8086", "0x56a0"),
    }
    for number, (vendor, device) in numbers.items():
        folder = tmp_path / f"card{number}" / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    (tmp_path / "card4").mkdir()  # a screen of no card
    assert torch_builds.intel_cards(tmp_path) == ["e20b", "56a0"]
    assert torch_builds.intel_cards(tmp_path / "nothing") == []


def test_intel_cards_in_the_registry_of_windows() -> None:
    cards = {0: "PCI\\VEN_8086&DEV_E20B&SUBSYS_1", 1: "pci\\ven_8086&dev_a780", 2: "pci\\ven_10de&dev_2684"}

    class Registry:
        HKEY_LOCAL_MACHINE = None

        @staticmethod
        def OpenKey(_root: None, path: str) -> Any:
            if int(path[-4:]) not in cards:
                raise FileNotFoundError
            return contextlib.nullcontext(cards[int(path[-4:])])

        @staticmethod
        def QueryValueEx(key: str, name: str) -> tuple[str, int]:
            assert name == "MatchingDeviceId"
            return key, 1

    assert torch_builds._in_registry(Registry) == ["e20b", "a780"]


def test_the_build_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_builds, "nvidia_cards", lambda: [nvidia("RTX 4090", "580.65.06", 8, 9)])
    monkeypatch.setattr(torch_builds, "amd_cards", list)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setenv(torch_builds.VARIABLE, "cpu")
    assert torch_builds.chosen().build is torch_builds.CPU
    monkeypatch.setenv(torch_builds.VARIABLE, "cu999")
    choice = torch_builds.chosen()
    assert (choice.build, "cu999 is none of" in choice.why) == (torch_builds.CUDA_130, True)


def test_amd_cards_are_read_from_the_kernel(tmp_path: Path) -> None:
    for number, version in enumerate(("0", "90010", "110001", "100300", "110001")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "properties").write_text(f"simd_count 8\ngfx_target_version {version}\n")
    assert torch_builds.amd_cards(tmp_path) == ["gfx90a", "gfx1101", "gfx1030"]
    assert torch_builds.amd_cards(tmp_path / "nothing") == []


@pytest.mark.skipif(sys.platform == "win32", reason="the driver's program is a shell script here")
def test_nvidia_cards_are_those_that_the_driver_lists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in *compute_cap) echo "NVIDIA GeForce RTX 4090, 580.65.06, 8.9";;'
        ' *) echo "NVIDIA GeForce RTX 4090, 580.65.06";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert torch_builds.nvidia_cards() == [nvidia("NVIDIA GeForce RTX 4090", "580.65.06", 8, 9)]
    program.write_text('#!/bin/sh\ncase "$1" in *compute_cap) exit 2;; *) echo "Old card, 470.2";; esac\n')
    assert torch_builds.nvidia_cards() == [nvidia("Old card", "470.2")]
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    monkeypatch.setattr(torch_builds, "NVIDIA_VERSION", tmp_path / "version")
    assert torch_builds.nvidia_cards() == []
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.120  Fri Sep 13\n")
    assert torch_builds.nvidia_cards() == [nvidia("the NVIDIA card", "550.120")]
