"""Cards as their drivers tell of them, sound and broken."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from engine.hardware.gpu_info import Vendor
from engine.hardware.gpus import graphics_cards, registry_gpus, sysfs_gpus
from engine.hardware.nvml import Nvml, NvmlUnavailableError, nvidia_gpus
from tests.unit.fake_nvml import GIB, FakeNvml, card, process


def test_a_card_is_described() -> None:
    fake = FakeNvml(
        card(
            ComputeRunningProcesses=[process(os.getpid(), 3 * GIB), process(1, 2 * GIB)],
            GraphicsRunningProcesses=[process(1, 2 * GIB)],
            MemoryInfo=SimpleNamespace(total=24 * GIB, free=18 * GIB, used=6 * GIB),
        )
    )
    (gpu,), note = nvidia_gpus(Nvml(fake))
    assert note == ""
    assert (gpu.name, gpu.driver, gpu.compute_capability) == ("NVIDIA GeForce RTX 4090", "580.65", "8.9")
    assert (gpu.total_bytes, gpu.free_bytes, gpu.used_by_others_bytes) == (24 * GIB, 18 * GIB, 3 * GIB)
    assert (gpu.pcie_generation, gpu.pcie_width, gpu.pcie_generation_now, gpu.pcie_width_now) == (4, 16, 1, 16)
    assert gpu.power_limit_w == 450
    assert gpu.memory_bytes_per_s == pytest.approx(1008e9, rel=0.01)
    assert gpu.shader_flops == pytest.approx(82.6e12, rel=0.01)


def test_what_the_driver_does_not_tell_is_none() -> None:
    (gpu,), _ = nvidia_gpus(Nvml(FakeNvml({"nvmlDeviceGetName": "NVIDIA GB10"})))
    assert (gpu.name, gpu.total_bytes, gpu.used_by_others_bytes, gpu.pcie_width) == ("NVIDIA GB10", None, None, None)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "No NVIDIA driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "updated"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "too old"),
        (pynvml.NVML_ERROR_UNKNOWN, "restart or update"),
    ],
)
def test_a_broken_driver_is_a_sentence(failure: int, words: str) -> None:
    fake = FakeNvml(card())
    fake.failure = failure
    gpus, note = nvidia_gpus(Nvml(fake))
    assert gpus == ()
    assert words in note
    assert note.endswith(".")


def test_a_library_that_is_none_is_a_sentence() -> None:
    def broken() -> None:
        raise OSError("file too short")

    gpus, note = nvidia_gpus(Nvml(SimpleNamespace(nvmlInit=broken, NVMLError=pynvml.NVMLError)))
    assert gpus == ()
    assert "file too short" in note
    assert nvidia_gpus(Nvml(SimpleNamespace(NVMLError=pynvml.NVMLError)))[1]


def test_a_driver_that_hangs_is_given_up_and_asked_again_when_it_is_back() -> None:
    fake = FakeNvml(card())
    fake.hang = threading.Event()
    nvml = Nvml(fake)
    try:
        for _ in range(3):
            with pytest.raises(NvmlUnavailableError, match="NVIDIA driver"):
                nvml.look(lambda _card: None, timeout_s=0.01)
        # However often it is asked meanwhile, one thread waits.
        assert sum(thread.name == "nvml" for thread in threading.enumerate()) == 1
    finally:
        fake.hang.set()
    fake.hang = None
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join(10)
    assert len(nvidia_gpus(nvml)[0]) == 1


def test_a_driver_that_goes_away_is_opened_again() -> None:
    fake = FakeNvml(card())
    nvml = Nvml(fake)
    assert len(nvidia_gpus(nvml)[0]) == 1
    fake.failure = pynvml.NVML_ERROR_UNINITIALIZED
    assert nvidia_gpus(nvml)[0] == ()
    fake.failure = None
    assert len(nvidia_gpus(nvml)[0]) == 1
    assert fake.inits == 2


def test_one_lost_card_does_not_hide_the_other() -> None:
    fake = FakeNvml(card(handle=pynvml.NVML_ERROR_GPU_IS_LOST), card(Name="NVIDIA T4"))
    assert [gpu.name for gpu in nvidia_gpus(Nvml(fake))[0]] == ["NVIDIA T4"]


def drm_card(root: Path, name: str, bus: str, files: dict[str, str]) -> None:
    device = root / "devices" / bus
    device.mkdir(parents=True)
    for file, text in files.items():
        (device / file).parent.mkdir(parents=True, exist_ok=True)
        (device / file).write_text(f"{text}\n")
    (root / "drm" / name).mkdir(parents=True)
    (root / "drm" / name / "device").symlink_to(device)


RADEON = {
    "vendor": "0x1002",
    "device": "0x744c",
    "product_name": "Radeon RX 7900 XTX",
    "mem_info_vram_total": str(24 * GIB),
    "mem_info_vram_used": str(2 * GIB),
    "mem_busy_percent": "10",
    "gpu_busy_percent": "40",
    "max_link_speed": "16.0 GT/s PCIe",
    "max_link_width": "16",
    "current_link_speed": "2.5 GT/s PCIe",
    "current_link_width": "8",
    "hwmon/hwmon3/power1_cap": "303000000",
    "hwmon/hwmon3/power1_average": "55000000",
    "hwmon/hwmon3/temp1_input": "48000",
}


@pytest.fixture
def drm(tmp_path: Path) -> Path:
    drm_card(tmp_path, "card0", "0000:00:02.0", {"vendor": "0x8086", "device": "0x9a49"})
    drm_card(tmp_path, "card1", "0000:03:00.0", RADEON)
    drm_card(tmp_path, "card2", "0000:09:00.0", {"vendor": "0x8086", "device": "0x56a0"})
    drm_card(tmp_path, "card3", "0000:01:00.0", {"vendor": "0x10de", "device": "0x2684"})
    (tmp_path / "drm" / "card1-DP-1").mkdir()
    (tmp_path / "drm" / "renderD128").mkdir()
    return tmp_path / "drm"


def test_amd_and_intel_are_read_from_the_kernels_files(drm: Path) -> None:
    integrated, radeon, arc = sysfs_gpus(drm)
    assert (integrated.vendor, integrated.is_integrated, integrated.total_bytes) == (Vendor.INTEL, True, None)
    assert (radeon.name, radeon.vendor, radeon.is_integrated) == ("AMD Radeon RX 7900 XTX", Vendor.AMD, False)
    assert (radeon.total_bytes, radeon.free_bytes) == (24 * GIB, 22 * GIB)
    assert (radeon.pcie_generation, radeon.pcie_width) == (4, 16)
    assert (radeon.pcie_generation_now, radeon.pcie_width_now) == (1, 8)
    assert (radeon.power_limit_w, radeon.bus) == (303, "0000:03:00.0")
    assert (arc.vendor, arc.is_integrated, arc.total_bytes) == (Vendor.INTEL, False, None)


def test_an_amd_processors_graphics_are_no_card(tmp_path: Path) -> None:
    files = {"vendor": "0x1002", "device": "0x164e", "mem_info_vram_total": str(GIB // 2)}
    drm_card(tmp_path, "card0", "0000:0e:00.0", files)
    (gpu,) = sysfs_gpus(tmp_path / "drm")
    assert gpu.is_integrated
    assert gpu.name.startswith("AMD")


@pytest.mark.parametrize("text", ["", "garbage", "-1x", "99999999999999999999999999999999", "\x00"])
def test_files_with_nonsense_are_no_error(tmp_path: Path, text: str) -> None:
    drm_card(tmp_path, "card0", "0000:03:00.0", {**dict.fromkeys(RADEON, text), "vendor": "0x1002"})
    assert len(sysfs_gpus(tmp_path / "drm")) == 1


def test_all_cards_with_the_useful_ones_first(drm: Path) -> None:
    gpus, note = graphics_cards(Nvml(FakeNvml(card())), drm)
    assert [gpu.vendor for gpu in gpus] == [Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL, Vendor.INTEL]
    assert gpus[-1].is_integrated
    assert note == ""


def test_other_cards_do_not_hide_that_nvidias_driver_is_broken(drm: Path) -> None:
    fake = FakeNvml(card())
    fake.failure = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    gpus, note = graphics_cards(Nvml(fake), drm)
    assert len(gpus) == 3
    assert "restart the computer" in note
    fake.failure = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert graphics_cards(Nvml(fake), drm)[1] == ""


def test_no_card_at_all_is_said(tmp_path: Path) -> None:
    fake = FakeNvml()
    fake.failure = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    cards, note = graphics_cards(Nvml(fake), tmp_path / "nowhere")
    assert cards == ()
    assert "NVIDIA" in note


class FakeRegistry:
    """Windows's registry, as far as it is read: nested dictionaries."""

    HKEY_LOCAL_MACHINE = object()

    def __init__(self, cards: dict[str, dict[str, Any] | None]) -> None:
        self._cards = cards

    def OpenKey(self, key: Any, name: str) -> Any:
        values = self._cards if key is self.HKEY_LOCAL_MACHINE else key.values[name]
        if values is None:
            raise PermissionError(name)
        return FakeKey(values)

    def QueryInfoKey(self, key: Any) -> tuple[int, int, int]:
        return len(key.values), 0, 0

    def EnumKey(self, key: Any, number: int) -> str:
        return list(key.values)[number]

    def QueryValueEx(self, key: Any, name: str) -> tuple[Any, int]:
        if name not in key.values:
            raise FileNotFoundError(name)
        return key.values[name], 1


class FakeKey:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __enter__(self) -> "FakeKey":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_windowss_registry() -> None:
    radeon = {
        "DriverDesc": "AMD Radeon RX 7800 XT",
        "MatchingDeviceId": r"PCI\VEN_1002&DEV_747E",
        "HardwareInformation.qwMemorySize": 16 * GIB,
        "DriverVersion": "32.0.1",
    }
    geforce = {**radeon, "MatchingDeviceId": r"PCI\VEN_10DE&DEV_2684"}
    graphics = {"DriverDesc": "Intel(R) UHD Graphics", "MatchingDeviceId": r"PCI\VEN_8086&DEV_4680"}
    cards = {"0000": radeon, "0001": geforce, "0002": graphics, "0003": None, "Properties": {}}
    first, second = registry_gpus(FakeRegistry(cards))
    assert (first.name, first.total_bytes, first.driver, first.is_integrated) == (
        "AMD Radeon RX 7800 XT",
        16 * GIB,
        "32.0.1",
        False,
    )
    assert (second.vendor, second.is_integrated) == (Vendor.INTEL, True)
