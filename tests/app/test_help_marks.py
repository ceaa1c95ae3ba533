"""The "?" beside cards and lanes: reached by keyboard, read by screen readers, closed again by a key."""

from __future__ import annotations

import time

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.services.engine_client import EngineClient
from app.services.history.history import History
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.views.monitor.engine_cards import EngineCards, ExpertCard
from app.widgets.scaffold import Card, HelpMark
from app.widgets.timeline.lanes import lane_help, lanes_of, machine_lanes
from app.widgets.timeline.view import TimelineView
from tests.app.recorded import STEP_NS, decoded, sample, steady_devices


def sentences(text: str) -> int:
    return len([part for part in text.replace("?", ".").split(". ") if part.strip()])


@pytest.mark.qt_log_ignore("does not support", extend=True)  # the offscreen platform has no pop-up windows
@pytest.mark.parametrize("key", [Qt.Key.Key_Space, Qt.Key.Key_Return])
def test_a_mark_opens_and_closes_by_key(qtbot: QtBot, key: Qt.Key) -> None:
    mark = HelpMark("Cache", "It keeps what is used. A hit was there already.")
    qtbot.addWidget(mark)
    mark.show()
    assert "Cache" in mark.accessibleName()
    assert mark.accessibleDescription() == mark.explanation
    assert mark.focusPolicy() & Qt.FocusPolicy.TabFocus
    qtbot.keyClick(mark, key)
    bubble = mark.bubble
    assert bubble is not None
    assert mark.explanation in bubble.accessibleName()
    qtbot.keyClick(bubble, Qt.Key.Key_Escape)
    assert mark.bubble is None


def test_every_card_of_the_monitor_explains_itself(qtbot: QtBot, settings: Settings) -> None:
    client = EngineClient()
    hub = TelemetryHub(client, settings, steady_devices())
    whole = QWidget()
    qtbot.addWidget(whole)
    cards = EngineCards(client, hub, ExpertCard(whole), whole)
    found = cards.findChildren(Card)
    assert len(found) == 7
    for card in found:
        assert sentences(card.help.explanation) >= 2
        assert card.heading.text() in card.help.accessibleName()
    hub.deleteLater()
    client.deleteLater()


@pytest.mark.parametrize("on_device", [True, False])
def test_every_lane_has_a_mark_in_the_order_of_the_lanes(qtbot: QtBot, *, on_device: bool) -> None:
    now = time.perf_counter_ns()
    history = History()
    spans, steps = decoded(20, now - 20 * STEP_NS, on_device=on_device)
    history.add_spans(spans)
    history.add_steps(steps)
    view = TimelineView()
    qtbot.addWidget(view)
    view.explain_lanes()
    view.resize(900, 500)
    view.navigator.set_source(history, recorded=True)
    view.show()
    view.grab()
    wanted = [lane.key for lane in lanes_of(history, machine=False)]
    qtbot.waitUntil(lambda: list(view.marks) == wanted, timeout=20_000)
    tops = [mark.y() for mark in view.marks.values()]
    assert tops == sorted(tops)
    assert not any(mark.isHidden() for mark in view.marks.values())
    marks = list(view.marks.values())
    chain = [view.nextInFocusChain()]
    while chain[-1] is not view:
        chain.append(chain[-1].nextInFocusChain())
    assert [each for each in chain if each in marks] == marks


def test_every_lane_that_there_can_be_is_explained() -> None:
    history = History()
    spans, steps = decoded(2, 10**12, on_device=True)
    history.add_spans(spans)
    history.add_steps(steps)
    history.add_sample(10**12, sample())
    history.add_gauges(10**12, {"gpu_power": 1.0, "cpu_power": 1.0, "pcie_rx": 1.0, "disk_read": 1.0, "gpu_clock": 1.0})
    lanes = [*lanes_of(history, machine=True), *machine_lanes(history)]
    assert len(lanes) > 12
    for lane in lanes:
        assert sentences(lane_help(lane)) >= 2, lane.key
