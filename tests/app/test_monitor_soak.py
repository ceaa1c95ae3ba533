"""An hour of the Monitor, by a clock that runs fast: what it holds does not grow."""

import gc
import logging
import os
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.views.monitor.page import MonitorPage
from engine.protocol import TelemetryCounters, TelemetrySpans
from engine.telemetry.records import pack
from tests.app.cache_reports import report, tier
from tests.app.recorded import STEP_NS, decoded, expert_map, steady_devices
from tests.app.test_monitor_page import WatchedEngine

_log = logging.getLogger("switchyard.soak")

MESSAGE_STEPS = 12
"""A message every quarter of a second, as the engine sends them."""
LAYERS = 60
"""50 tokens a second of 120 spans each: as many spans as the fastest decode has."""
MIB = 2**20
FILLED_MINUTES = 12
"""By then the last steps, which fill last, have filled their ring; what hours fill are a few kilobytes a minute."""


class FastClock:
    """Nanoseconds that pass as the test says."""

    def __init__(self) -> None:
        self.now_ns = time.perf_counter_ns()

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> FastClock:
    return FastClock()


@pytest.fixture
def page(qtbot: QtBot, qapp: QApplication, settings: Settings, clock: FastClock) -> Iterator[MonitorPage]:
    engine = WatchedEngine()
    hub = TelemetryHub(engine, settings, steady_devices(), clock_ns=clock)  # type: ignore[arg-type]
    settings.monitor_details = True
    result = MonitorPage(engine, hub, settings)  # type: ignore[arg-type]
    qtbot.addWidget(result)
    result.resize(1072, 800)
    with qtbot.waitSignal(hub.ready, timeout=20_000):
        result.show()
    yield result
    result.hide()
    result.close_down()
    hub.close()
    hub.deleteLater()
    engine.deleteLater()


def soak(page: MonitorPage, clock: FastClock, minutes: float) -> list[tuple[float, float]]:
    """Decodes for so long with the Monitor open; (minutes, MiB that the process holds) of every half minute."""
    engine, hub = page._client, page._hub
    spans, steps = decoded(MESSAGE_STEPS, 0, layers=LAYERS, on_device=True)
    spans["end_ns"] -= np.random.default_rng(7).integers(0, STEP_NS // LAYERS // 4, len(spans))
    took_ns = MESSAGE_STEPS * STEP_NS
    held, process = [], psutil.Process()
    cards, map_of_experts = report(tier(), tier("ram")), expert_map(48, 128)
    messages = round(minutes * 60e9 / took_ns)
    for number in range(messages):
        begin = clock.now_ns
        clock.now_ns += took_ns
        for records in (spans, steps):
            records["start_ns"] += begin
            records["end_ns"] += begin
        steps["step"] = number * MESSAGE_STEPS + np.arange(MESSAGE_STEPS)
        told = TelemetrySpans(clock.now_ns, number * took_ns / 1e9, len(spans), pack(spans), 0)
        engine.recorded.emit(told)
        engine.recorded.emit(TelemetryCounters(len(steps), pack(steps), 0))
        for records in (spans, steps):
            records["start_ns"] -= begin
            records["end_ns"] -= begin
        if number % 8 == 0:
            engine.recorded.emit(cards)
            engine.recorded.emit(map_of_experts)
            while hub.recorder.waiting > 8:
                time.sleep(0.001)
            page._refresh()
            page.timeline.view.refresh()
            page.timeline.view.viewport().repaint()
            page.experts.view.repaint()
            QApplication.processEvents()
        if number % max(1, round(30e9 / took_ns)) == 0:
            gc.collect()
            held.append((number * took_ns / 60e9, process.memory_info().rss / MIB))
            _log.info("%.1f minutes: %.1f MiB", *held[-1])
    assert hub.recorder.dropped == 0
    return held


def slope(held: list[tuple[float, float]]) -> float:
    """MiB an hour, of a line through all of them."""
    minutes, mib = np.array(held).T
    return float(60 * np.polyfit(minutes, mib, 1)[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_hour_in_little(page: MonitorPage, clock: FastClock) -> None:
    held = soak(page, clock, 2.5)
    # Until minute eleven the last steps fill their ring, some 3 MiB; a leak of 50 kB a message would be 12 MiB.
    after = [each for each in held if each[0] >= 1]
    assert after[-1][1] - after[0][1] < 12


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_an_hour(page: MonitorPage, clock: FastClock) -> None:
    held = soak(page, clock, float(os.environ.get("SWITCHYARD_SOAK_MINUTES", "60")))
    after = [each for each in held if each[0] >= FILLED_MINUTES]
    said = f"{held[-1][0]:.0f} minutes: {slope(after):+.1f} MiB an hour, {after[0][1]:.0f} to {after[-1][1]:.0f} MiB"
    _log.warning(said)  # what a person runs this for, with -o log_cli=true
    assert slope(after) < 12, said
