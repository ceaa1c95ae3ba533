"""Samples of sensors: right where they are told, absent where they are not, back when they are back."""

import os
from dataclasses import fields
from pathlib import Path

import psutil
import pynvml
import pytest

from engine.hardware.nvml import Nvml
from engine.hardware.sensors import DeviceSensors, GpuSensors
from tests.unit.fake_nvml import GIB, FakeNvml, card, process
from tests.unit.test_hardware_gpus import RADEON, drm_card
from tests.unit.test_hardware_parts import sys_with, write


class Clock:
    """Goes on by a second each time it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def no_cards(tmp_path: Path) -> GpuSensors:
    fake = FakeNvml()
    fake.failure = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    return GpuSensors(Nvml(fake), tmp_path / "no-drm")


def test_an_nvidia_card(tmp_path: Path) -> None:
    fake = FakeNvml(
        card(
            ComputeRunningProcesses=[process(os.getpid(), GIB // 2)],
            CurrentClocksEventReasons=pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        )
    )
    (gpu,) = GpuSensors(Nvml(fake), tmp_path).sample()
    assert (gpu.busy, gpu.memory_busy) == (0.5, 0.25)
    assert (gpu.vram_total, gpu.vram_used, gpu.vram_ours, gpu.vram_others) == (24 * GIB, GIB, GIB // 2, GIB // 2)
    assert (gpu.clock_hz, gpu.memory_clock_hz) == (2e9, pytest.approx(10.501e9))
    assert (gpu.power_w, gpu.power_limit_w, gpu.temperature_c) == (123, 450, 61)
    assert (gpu.pcie_rx, gpu.pcie_tx) == (1e6, 2e6)
    assert gpu.slowed_by == ("heat",)


def test_a_card_that_vanishes_is_listed_empty_and_comes_back(tmp_path: Path) -> None:
    fake = FakeNvml(card())
    sensors = GpuSensors(Nvml(fake), tmp_path)
    (there,) = sensors.sample()
    fake.failure = pynvml.NVML_ERROR_UNKNOWN
    for _ in range(3):
        (gone,) = sensors.sample()
        assert gone.bus == there.bus
        assert all(
            getattr(gone, field.name) in (None, ()) for field in fields(gone) if field.name not in ("bus", "vendor")
        )
    fake.failure = None
    assert sensors.sample() == (there,)
    sensors.close()
    assert fake.shutdowns == fake.inits


def test_a_value_that_fails_in_the_middle_leaves_the_others(tmp_path: Path) -> None:
    fake = FakeNvml(card(PowerUsage=pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)))
    (gpu,) = GpuSensors(Nvml(fake), tmp_path).sample()
    assert gpu.power_w is None
    assert gpu.temperature_c == 61


def test_an_amd_card(tmp_path: Path) -> None:
    drm_card(tmp_path, "card0", "0000:03:00.0", RADEON)
    fake = FakeNvml()
    fake.failure = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    (gpu,) = GpuSensors(Nvml(fake), tmp_path / "drm").sample()
    assert (gpu.busy, gpu.memory_busy, gpu.power_w, gpu.temperature_c) == pytest.approx((0.4, 0.1, 55, 48))
    assert (gpu.vram_total, gpu.vram_used, gpu.vram_ours) == (24 * GIB, 2 * GIB, None)


def test_the_first_sample_has_no_rates_and_the_second_has(tmp_path: Path) -> None:
    sensors = DeviceSensors(gpus=no_cards(tmp_path), sys_root=tmp_path / "no-sys", clock=Clock())
    first = sensors.sample()
    assert (first.cpu_by_core, first.cpu_ours, first.minor_faults, first.disk_read) == (None, None, None, None)
    assert first.gpus == ()
    second = sensors.sample()
    assert (second.at_s, second.cpu_power_w, second.disk_read) == (2.0, None, None)
    assert second.cpu_ours is not None
    assert second.cpu_ours >= 0
    assert 0 < (second.ram_ours or 0) <= (second.ram_total or 0)
    assert second.cpu_by_core is None or all(0 <= busy <= 1 for busy in second.cpu_by_core)


def test_a_process_that_has_gone_or_is_another_now(tmp_path: Path) -> None:
    pids = [os.getpid(), 2**22 + 7]
    sensors = DeviceSensors(pids=lambda: pids, gpus=no_cards(tmp_path), sys_root=tmp_path, clock=Clock())
    sensors.sample()
    pids.clear()
    assert sensors.sample().cpu_ours == 0
    pids.append(os.getpid())
    # What it did before it was seen is not of this second.
    assert sensors.sample().cpu_ours == 0
    assert psutil.pid_exists(os.getpid())


def test_power_counters_that_begin_anew(tmp_path: Path) -> None:
    rapl = tmp_path / "class" / "powercap"
    files = {"name": "package-0", "energy_uj": "999000000", "max_energy_range_uj": "999999999"}
    write(rapl / "intel-rapl:0", files)
    write(rapl / "intel-rapl:0:0", {**files, "name": "core"})
    sensors = DeviceSensors(gpus=no_cards(tmp_path), sys_root=tmp_path, clock=Clock())
    assert sensors.sample().cpu_power_w is None
    (rapl / "intel-rapl:0" / "energy_uj").write_text("14000000")
    assert sensors.sample().cpu_power_w == pytest.approx(15)
    (rapl / "intel-rapl:0" / "energy_uj").unlink()  # as it is for those who may not read it
    assert sensors.sample().cpu_power_w is None


@pytest.mark.skipif(not hasattr(os, "major"), reason="Linux's numbers of disks")
def test_the_disk_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    root = sys_with(tmp_path / "sys", folder, "nvme0n1", {"stat": "1 0 1000 5 1 0 2000 5 0 100 10"})
    sensors = DeviceSensors(folder, gpus=no_cards(tmp_path), sys_root=root, clock=Clock())
    assert sensors.sample().disk_read is None
    (root / "devices" / "nvme0n1" / "stat").write_text("9 0 3000 5 9 0 2500 5 0 600 10")
    sample = sensors.sample()
    assert (sample.disk_read, sample.disk_write, sample.disk_busy) == (2000 * 512, 500 * 512, 0.5)
    (root / "devices" / "nvme0n1" / "stat").unlink()
    assert sensors.sample().disk_read is None


def test_here_nothing_raises(tmp_path: Path) -> None:
    sensors = DeviceSensors(tmp_path / "not" / "yet")
    sensors.sample()
    assert sensors.sample().ram_total
    sensors.close()
