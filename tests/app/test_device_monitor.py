"""The one place that asks the machine: what it says reaches everybody, and its troubles nobody."""

import threading
from collections.abc import Iterator

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services import device_monitor
from app.services.device_monitor import DeviceMonitor
from engine.hardware.probe import Probe
from engine.hardware.sensors import SensorSample
from tests.app.recorded import SteadySensors, machine, sample, steady_devices


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_monitor, "EVERY_S", 0.01)
    monkeypatch.setattr(device_monitor, "_BUSY_PART", 1.0)


@pytest.fixture
def monitors(qapp: QApplication) -> Iterator[list[DeviceMonitor]]:
    made: list[DeviceMonitor] = []
    yield made
    for monitor in made:
        monitor.stop()
        monitor.deleteLater()


def test_this_machine_tells_of_itself(monitors: list[DeviceMonitor], qtbot: QtBot) -> None:
    monitors.append(DeviceMonitor())
    with qtbot.waitSignals([monitors[0].sampled, monitors[0].hardware_found], timeout=60_000):
        monitors[0].start()
    samples: list[SensorSample] = []
    monitors[0].sampled.connect(samples.append)
    qtbot.waitUntil(lambda: any(each.cpu_by_core for each in samples), timeout=20_000)  # clocks tick slowly
    said = samples[-1]
    assert said.ram_ours is not None
    assert said.ram_used is not None
    assert said.ram_total is not None
    assert 0 < said.ram_ours < said.ram_total
    assert 0 < said.ram_used <= said.ram_total


def test_everybody_hears_the_same_on_the_guis_thread(monitors: list[DeviceMonitor], qtbot: QtBot) -> None:
    monitors.append(steady_devices(sample(busy=0.7)))
    heard: list[tuple[str, SensorSample, bool]] = []
    for name in ("footer", "monitor"):
        monitors[0].sampled.connect(
            lambda said, name=name: heard.append((name, said, threading.current_thread() is threading.main_thread()))
        )
    monitors[0].start()
    monitors[0].start()
    qtbot.waitUntil(lambda: len(heard) >= 4, timeout=20_000)
    assert heard[:2] == [("footer", sample(busy=0.7), True), ("monitor", sample(busy=0.7), True)]
    assert [thread.name for thread in threading.enumerate()].count("device-monitor") == 1


def test_sensors_that_fail_are_opened_again(monitors: list[DeviceMonitor], qtbot: QtBot) -> None:
    opened: list[SteadySensors] = []

    class Broken(SteadySensors):
        def sample(self) -> SensorSample:
            raise OSError("the card fell asleep")

    def make() -> SteadySensors:
        opened.append(SteadySensors() if opened else Broken())
        return opened[-1]

    def look() -> Probe:
        raise OSError("a driver was being replaced")

    monitors.append(DeviceMonitor(make_sensors=make, look=look))
    with qtbot.waitSignal(monitors[0].sampled, timeout=20_000):
        monitors[0].start()
    assert len(opened) == 2


def test_a_slow_look_at_the_hardware_keeps_no_sample_waiting(monitors: list[DeviceMonitor], qtbot: QtBot) -> None:
    answer = threading.Event()

    def look() -> Probe:
        answer.wait(60)
        return machine()

    monitors.append(DeviceMonitor(make_sensors=SteadySensors, look=look))
    with qtbot.waitSignal(monitors[0].sampled, timeout=20_000):
        monitors[0].start()
    with qtbot.waitSignal(monitors[0].hardware_found, timeout=20_000):
        answer.set()
