"""The machine's sensors in their card: few cores and many, no graphics card and eight, and drivers that go away."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QPointF
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.views.monitor.machine_card import CoreGrid, MachineCard
from engine.hardware.gpu_info import Vendor
from engine.hardware.sensors import GpuSample, SensorSample

GIB = 2**30


def gpu(number: int, **changes: object) -> GpuSample:
    told: dict[str, object] = {
        "busy": 0.1 * number,
        "vram_total": 24 * GIB,
        "vram_used": 20 * GIB,
        "vram_ours": 15 * GIB,
        "vram_others": 5 * GIB,
        "clock_hz": 2.52e9,
        "power_w": 312.0,
        "power_limit_w": 450.0,
        "temperature_c": 71.0,
        "pcie_rx": 12.4e9,
        "pcie_tx": 0.2e9,
        "slowed_by": ("heat",),
    }
    return GpuSample(f"0000:0{number}:00.0", Vendor.NVIDIA, **(told | changes))  # type: ignore[arg-type]


def sample(cores: int, gpus: int) -> SensorSample:
    busy = tuple(np.random.default_rng(cores).uniform(0, 1, cores).tolist())
    return SensorSample(
        0.0,
        tuple(gpu(number) for number in range(gpus)),
        busy,
        cores / 2,
        cpu_clock_hz=3.4e9,
        cpu_temperature_c=61.0,
        disk_read=3e8,
        disk_write=0.0,
        minor_faults=100.0,
        major_faults=2.0,
    )


@pytest.fixture
def card(qtbot: QtBot, qapp: QApplication) -> MachineCard:
    result = MachineCard()
    qtbot.addWidget(result)
    result.resize(420, 500)
    result.show()
    return result


@pytest.mark.parametrize(("cores", "gpus"), [(1, 0), (2, 1), (16, 2), (128, 8), (512, 8)])
def test_machines_of_every_size(card: MachineCard, cores: int, gpus: int) -> None:
    card.show_sample(sample(cores, gpus))
    assert "ours 50%" in card.cpu.text()
    assert "3.4 GHz" in card.cpu.text()
    assert "power not available" in card.cpu.text()
    assert len([row for row in card.gpus if row.isVisibleTo(card)]) == gpus
    assert card.no_gpu.isVisibleTo(card) == (gpus == 0)
    if gpus:
        assert "GPU 0 · 0% busy" in card.gpus[0].head.text()
        assert "312 / 450 W · 71 °C · PCIe 12.4 in, 0.2 out GB/s · slowed by heat" in card.gpus[0].tail.text()
    assert f"{cores} CPUs" in card.cores.accessibleName()
    assert not card.grab().isNull()


def test_a_driver_that_goes_away_is_said(card: MachineCard) -> None:
    card.show_sample(sample(4, 2))
    lost = GpuSample("0000:00:00.0", Vendor.NVIDIA)
    card.show_sample(SensorSample(0.0, (lost, gpu(1, power_w=None, clock_hz=None)), None))
    assert "not responding" in card.gpus[0].head.text()
    assert " W" not in card.gpus[1].tail.text()
    assert not card.cores.isVisibleTo(card)
    assert not card.grab().isNull()
    card.show_sample(None)
    assert not card.grab().isNull()


@given(cores=st.integers(1, 1024), width=st.integers(1, 2000))
def test_every_core_has_a_place(qapp: QApplication, cores: int, width: int) -> None:
    grid = CoreGrid()
    grid.show_cores([0.5] * cores)
    grid.resize(width, grid.heightForWidth(width))
    rows, columns = grid.grid(width)
    assert rows * columns >= cores
    cells = grid.cells()
    assert len(cells) == cores
    assert all(cell.right() <= width + 1 and cell.bottom() <= grid.height() for cell in cells)
    if width >= 9 * cores:
        assert rows == 1


def test_a_core_is_named_under_the_mouse(card: MachineCard) -> None:
    card.show_sample(sample(128, 0))
    assert card.cores.text_at(card.cores.cells()[77].center()).startswith("CPU 77:")
    assert card.cores.text_at(QPointF(-5, -5)) == ""
