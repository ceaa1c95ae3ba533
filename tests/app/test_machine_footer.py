"""The sidebar's foot says what the machine holds, in words and figures that add up."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from PySide6.QtWidgets import QApplication, QLabel
from pytestqt.qtbot import QtBot

from app.services.device_monitor import DeviceMonitor
from app.services.engine_client import EngineClient
from app.theme import LIGHT
from app.views.main_window.machine_footer import MachineFooter
from app.widgets.memory_bar import BarPart, MemoryBar, MemoryGauge, MemoryLegend
from app.widgets.quantities import memory, used_of
from engine.common.model_info import ModelInfo
from engine.hardware.gpu_info import Vendor
from engine.hardware.probe import GpuInfo
from engine.hardware.sensors import GpuSample
from engine.protocol import Telemetry
from tests.app.recorded import machine, sample, steady_devices

GIB = 2**30
MODEL = ModelInfo(
    name="starter", path="/m", family="mixtral", device="cpu", precision="bf16", threads=2, parameters=1, layers=1,
    experts=8, experts_per_token=7, context_tokens=2048, weights_bytes=1, experts_bytes=1, kv_bytes_per_token=1,
)  # fmt: skip
GPU = GpuInfo("RTX 4060", 8 * GIB, 3 * GIB, "555", "8.9", 4)


SAMPLE = replace(sample(), ram_total=32 * GIB, ram_used=10 * GIB, ram_ours=GIB)
CARD = GpuSample("0000:01:00.0", Vendor.NVIDIA, vram_total=8 * GIB, vram_used=5 * GIB)


@pytest.fixture
def client(qapp: QApplication) -> Iterator[EngineClient]:
    result = EngineClient()
    yield result
    result.deleteLater()


@pytest.fixture
def devices(qapp: QApplication) -> Iterator[DeviceMonitor]:
    result = steady_devices()
    yield result
    result.stop()
    result.deleteLater()


@pytest.fixture
def footer(qtbot: QtBot, client: EngineClient, devices: DeviceMonitor) -> MachineFooter:
    result = MachineFooter(client, devices)
    qtbot.addWidget(result)
    result.show()
    return result


def _texts(footer: MachineFooter) -> list[str]:
    return [label.text() for label in footer.findChildren(QLabel) if label.isVisible()]


def test_ram_is_split_into_what_holds_it(footer: MachineFooter, client: EngineClient, devices: DeviceMonitor) -> None:
    devices.sampled.emit(replace(SAMPLE, ram_ours=6 * GIB + GIB // 2))
    client.telemetry.emit(
        Telemetry(
            rss_bytes=6 * GIB, weights_bytes=GIB, experts_bytes=4 * GIB, kv_bytes=GIB // 2, kv_tokens=9, tokens_per_s=0
        )
    )
    texts = _texts(footer)
    assert used_of(10 * GIB, 32 * GIB) in texts
    for name, amount in (
        ("Model", GIB),
        ("Its experts", 4 * GIB),
        ("Chat memory", GIB // 2),
        ("Switchyard", GIB),  # the rest of the engine's 6 GB, and the window
        ("Other programs", 3.5 * GIB),
    ):
        assert texts[texts.index(name) + 1] == memory(int(amount))


def test_without_a_gpu_it_says_so(footer: MachineFooter, devices: DeviceMonitor) -> None:
    devices.hardware_found.emit(machine())
    assert "No GPU in use" in _texts(footer)
    assert "VRAM" not in _texts(footer)
    assert "AMD Ryzen 7 7700 8-Core · 8 cores" in _texts(footer)


def test_with_a_gpu_there_is_a_vram_bar(footer: MachineFooter, devices: DeviceMonitor) -> None:
    devices.sampled.emit(replace(SAMPLE, gpus=(CARD,)))
    devices.hardware_found.emit(machine(GPU))
    assert "VRAM" in _texts(footer)
    assert used_of(5 * GIB, 8 * GIB) in _texts(footer)
    assert "RTX 4060, not in use" in _texts(footer)


def test_an_emulated_card_has_a_bar_of_its_own(
    footer: MachineFooter, client: EngineClient, devices: DeviceMonitor
) -> None:
    devices.sampled.emit(SAMPLE)
    held = Telemetry(6 * GIB, GIB, 4 * GIB, GIB // 2, 9, 0.0, 8 * GIB, 5 * GIB, 3 * GIB)
    client.telemetry.emit(held)
    assert "VRAM" in _texts(footer)
    assert used_of(5 * GIB, 8 * GIB) in _texts(footer)
    client.telemetry.emit(Telemetry(GIB, 0, 0, 0, 0, 0.0))
    assert "VRAM" not in _texts(footer)


def test_it_says_where_the_model_runs(
    footer: MachineFooter, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No model loaded" in _texts(footer)
    monkeypatch.setattr(client, "_model", MODEL)
    client.model_loaded.emit(MODEL)
    assert "starter\nCPU, 2 threads · bf16" in _texts(footer)


def test_it_says_whether_the_model_runs_as_tuned(footer: MachineFooter, client: EngineClient) -> None:
    client._model = replace(MODEL, device_note="Tuned on 21 Nov 2026: 34.1 tokens/s.")
    client.model_loaded.emit(client._model)
    assert "CPU, 2 threads · bf16 · tuned" in "\n".join(_texts(footer))
    client._model = replace(MODEL, device_note="The tuning of 21 Nov 2026 is not used: the RAM was 8 GB.")
    client.model_loaded.emit(client._model)
    assert "tuned" not in "\n".join(_texts(footer))


def test_the_bar_shows_parts_in_proportion_and_never_overflows(qtbot: QtBot) -> None:
    bar = MemoryBar()
    qtbot.addWidget(bar)
    bar.resize(100, 8)
    bar.show_parts((BarPart("a", 50, "gpu"), BarPart("b", 0, "hit"), BarPart("c", 500, "disk")), 100)
    image = bar.grab().toImage()
    ratio = image.devicePixelRatio()
    colours = [image.pixelColor(round(x * ratio), round(4 * ratio)).name().upper() for x in (25, 75, 97)]
    assert colours == [LIGHT.gpu, LIGHT.disk, LIGHT.disk]


def test_folded_it_is_one_bar_and_remembered(
    footer: MachineFooter, client: EngineClient, devices: DeviceMonitor, qtbot: QtBot
) -> None:
    footer.fit(208, 400)
    devices.sampled.emit(replace(SAMPLE, gpus=(CARD,)))
    assert sum(bar.isVisible() for bar in footer.findChildren(MemoryGauge)) == 2
    with qtbot.waitSignal(footer.folded) as told:
        footer.fold.click()
    footer.fit(208, 400)
    assert told.args == [True]
    shown = [bar for bar in footer.findChildren(MemoryGauge) if bar.isVisible()]
    assert [bar.accessibleName().split()[0] for bar in shown] == ["VRAM"]
    assert f"RAM {used_of(10 * GIB, 32 * GIB)}" in footer.toolTip()
    assert _texts(footer)[0] == "Memory"
    assert not footer.findChild(MemoryLegend).isVisible()
    footer.fold.click()
    footer.fit(208, 400)
    assert sum(bar.isVisible() for bar in footer.findChildren(MemoryGauge)) == 2
