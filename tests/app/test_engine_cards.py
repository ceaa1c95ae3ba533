"""The cards below the timeline: live, of a recorded session, narrow, and after the engine's death."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.engine_client import EngineClient
from app.services.history.history import History
from app.services.session_library import OpenedSession
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.theme import ThemeController
from app.views.monitor.engine_cards import EngineCards, ExpertCard
from app.widgets.timeline.lanes import lanes_of
from engine.protocol import IN_RAM, IN_VRAM, ExpertMap
from engine.telemetry.records import pack
from engine.telemetry.session_file import RecordedSession
from tests.app.cache_reports import report, tier, without_cache
from tests.app.recorded import STEP_NS, decoded, steady_devices
from tests.app.scripted_engine import STARTER


@pytest.fixture
def client(qapp: QApplication) -> Iterator[EngineClient]:
    result = EngineClient()
    yield result
    result.deleteLater()


@pytest.fixture
def hub(client: EngineClient, settings: Settings) -> Iterator[TelemetryHub]:
    result = TelemetryHub(client, settings, steady_devices())
    yield result
    result.deleteLater()


@pytest.fixture
def cards(qtbot: QtBot, client: EngineClient, hub: TelemetryHub) -> EngineCards:
    result = EngineCards(client, hub, ExpertCard())
    qtbot.addWidget(result)
    result.resize(1000, 600)
    result.show()
    return result


def _map(step: int, layers: int = 4, experts: int = 8) -> ExpertMap:
    numbers = np.arange(layers * experts, dtype=np.uint32)
    places = np.where(numbers % 3 == 0, IN_VRAM | IN_RAM, IN_RAM).astype(np.uint8)
    words = pack(numbers + step)
    return ExpertMap(
        tuple(range(layers)), experts, step, 9.0, pack(places), pack(places), words, words, words, (1000,) * layers
    )


def _session() -> OpenedSession:
    history = History()
    spans, steps = decoded(100, 0, on_device=True)
    history.add_spans(spans)
    history.add_steps(steps)
    moments = [20 * STEP_NS, 50 * STEP_NS, 90 * STEP_NS]
    return OpenedSession(
        "s",
        {},
        history,
        RecordedSession({}, spans, steps),
        [(at, _map(at // STEP_NS)) for at in moments],
        [(at, report(tier(recent_hit_rate=rate))) for at, rate in zip(moments, (0.2, 0.5, 0.8), strict=True)],
    )


def _rates(cards: EngineCards) -> list[float]:
    return list(cards.cache.rows["vram"].line.values)


def test_of_a_dense_model_nothing_is_said_about_experts(
    cards: EngineCards, hub: TelemetryHub, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    spans, steps = decoded(5, 0)
    steps["on_cpu"] = 0
    history.add_spans(spans)
    history.add_steps(steps)
    hub.history = history
    about_experts = (cards._experts, cards.cache, cards.token.bar, cards.token.values["hit"])
    cards.refresh()
    assert all(widget.isVisible() for widget in about_experts)  # nobody knows yet what will be loaded
    monkeypatch.setattr(EngineClient, "model", property(lambda _client: replace(STARTER, experts=0)))
    cards.refresh()
    assert not any(widget.isVisible() for widget in about_experts)
    assert cards.token.values["took"].isVisible()
    assert "experts" not in [lane.key for lane in lanes_of(history, machine=False)]


def test_what_the_hub_has_heard_is_shown(cards: EngineCards, hub: TelemetryHub) -> None:
    hub.report = report()
    hub.history = History()
    hub.history.add_steps(decoded(30, 0, on_device=True)[1])
    cards.refresh()
    assert not cards.cache.plot.isHidden()
    assert not cards.policies.isHidden()
    assert cards.token.values["used"].text() == "28"
    hub.report = None  # the engine has died
    cards.refresh()
    assert cards.cache.plot.isHidden()
    assert cards.policies.isHidden()
    hub.report = without_cache()
    cards.refresh()
    assert not cards.memory.isHidden()


def test_a_session_is_gone_through_with_the_maps_slider(cards: EngineCards, hub: TelemetryHub) -> None:
    hub.report = report()
    session = _session()
    cards._experts.show_recording(session.maps)
    cards.show_session(session)
    assert cards.cache.is_recorded
    assert _rates(cards) == [0.2, 0.5, 0.8]
    cards._experts.replay.setValue(0)
    assert _rates(cards) == [0.2]
    assert cards.token._note.text().split()[-2] == "20"
    cards.refresh()  # what happens meanwhile is not shown
    assert _rates(cards) == [0.2]
    cards.show_live()
    assert _rates(cards) == [0.6]
    assert not cards.cache.size_field.isHidden()


@pytest.mark.parametrize(("width", "font_px"), [(1400, 14), (640, 14), (640, 24), (420, 14)])
def test_narrow_cards_stand_below_each_other(
    cards: EngineCards, hub: TelemetryHub, theme: ThemeController, qtbot: QtBot, width: int, font_px: int
) -> None:
    theme.set_font_px(font_px)
    hub.report = report(tier(), tier("ram"))
    cards.refresh()
    cards.resize(width, 2000)

    def are_beside() -> bool:
        tops = [card.mapTo(cards, card.rect().topLeft()).y() for card in (cards.cache, cards.token)]
        return tops[0] == tops[1]

    qtbot.waitUntil(lambda: cards.width() == width and are_beside() == (width == 1400))
    assert cards.minimumSizeHint().width() <= 420 * font_px // 14
