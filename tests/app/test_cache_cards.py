"""The cache's cards and figures, the token's and the engine's: live, recorded, narrow, and after its death."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLabel, QWidget
from pytestqt.qtbot import QtBot

from app.models.cache_figures import (
    FREE,
    NO_FORECAST,
    forecast,
    memory_places,
    policies,
    room_slots,
    sound,
    token_figures,
)
from app.services.engine_client import EngineClient
from app.services.history.history import History
from app.services.session_library import OpenedSession
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.theme import ThemeController
from app.views.monitor.cache_card import CacheCard
from app.views.monitor.engine_cards import EngineCards, ExpertCard, MemoryCard, TokenCard
from app.views.monitor.prediction_card import PoliciesCard, PredictionCard
from app.widgets.expert_map.data import map_data
from app.widgets.expert_map.view import EXPERT, HITS, LAYER, PLACE, USES, ExpertTable, MapLegend
from app.widgets.miss_ratio_plot import MissRatioPlot
from app.widgets.quantities import memory, number
from app.widgets.timeline.lanes import lanes_of
from engine.protocol import IN_RAM, IN_VRAM, CacheReport, ExpertMap, MemoryPart, PolicyRate, PredictorRate, TierReport
from engine.telemetry.lanes import DECODE, PREFILL
from engine.telemetry.records import STEP, pack
from engine.telemetry.session_file import RecordedSession
from tests.app.cache_reports import MIB, report, tier, without_cache
from tests.app.recorded import STEP_NS, decoded, expert_map, steady_devices
from tests.app.scripted_engine import STARTER

LEFT, NO_KEYS = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier


def _texts(widget: QWidget) -> str:
    return "\n".join(label.text() for label in widget.findChildren(QLabel) if not label.isHidden())


@pytest.fixture
def plot(qtbot: QtBot) -> MissRatioPlot:
    result = MissRatioPlot()
    qtbot.addWidget(result)
    result.resize(400, 200)
    result.show()
    told = report()
    result.show_tier(told.tiers[0], forecast(told), 2000, 0.6)
    return result


@pytest.fixture
def card(qtbot: QtBot) -> CacheCard:
    result = CacheCard()
    qtbot.addWidget(result)
    result.resize(420, 380)
    result.show()
    return result


# --- the plot -----------------------------------------------------------------------------------------


def test_the_handle_is_dragged_and_let_go(plot: MissRatioPlot, qtbot: QtBot) -> None:
    moved: list[int] = []
    plot.moved.connect(moved.append)
    middle, right = QPoint(200, 100), QPoint(300, 100)
    with qtbot.waitSignal(plot.chosen) as chosen:
        QTest.mousePress(plot.viewport(), LEFT, NO_KEYS, middle)
        for at in (QPoint(250, 100), right):
            QTest.mouseMove(plot.viewport(), at)
        QTest.mouseRelease(plot.viewport(), LEFT, NO_KEYS, right)
    assert chosen.args == [moved[-1]]
    assert moved[-1] > moved[0] > 1000
    assert plot.is_moved


def test_keys_move_the_handle_and_enter_chooses(plot: MissRatioPlot, qtbot: QtBot) -> None:
    QTest.keyClick(plot, Qt.Key.Key_Right)
    assert plot.slots == 1061
    QTest.keyClick(plot, Qt.Key.Key_PageUp)
    assert plot.slots == 1061 + 614
    QTest.keyClick(plot, Qt.Key.Key_End)
    assert plot.slots == 6144
    with qtbot.waitSignal(plot.chosen) as chosen:
        QTest.keyClick(plot, Qt.Key.Key_Return)
    assert chosen.args == [6144]
    QTest.keyClick(plot, Qt.Key.Key_Home)
    assert plot.slots == 1
    QTest.keyClick(plot, Qt.Key.Key_Escape)
    assert plot.slots == 1000
    assert not plot.is_moved


def test_escape_while_dragging_chooses_nothing(plot: MissRatioPlot, qtbot: QtBot) -> None:
    with qtbot.assertNotEmitted(plot.chosen):
        QTest.mousePress(plot.viewport(), LEFT, NO_KEYS, QPoint(200, 100))
        QTest.mouseMove(plot.viewport(), QPoint(300, 100))
        assert plot.slots > 1000
        QTest.keyClick(plot, Qt.Key.Key_Escape)
        QTest.mouseRelease(plot.viewport(), LEFT, NO_KEYS, QPoint(300, 100))
    assert plot.slots == 1000


def test_the_plot_says_what_a_size_would_give(plot: MissRatioPlot) -> None:
    plot.set_slots(3000)
    size, gives = plot.texts()
    assert number(3000, 0) in size
    assert memory(3000 * 2 * MIB) in size
    assert "%" in gives
    assert "tokens/s" in gives
    assert number(3000, 0) in plot.accessibleDescription()


def test_the_engine_dies_while_the_handle_is_held(plot: MissRatioPlot, qtbot: QtBot) -> None:
    with qtbot.assertNotEmitted(plot.chosen):
        QTest.mousePress(plot.viewport(), LEFT, NO_KEYS, QPoint(200, 100))
        QTest.mouseMove(plot.viewport(), QPoint(300, 100))
        plot.show_tier(None, NO_FORECAST, 0, None)
        QTest.mouseRelease(plot.viewport(), LEFT, NO_KEYS, QPoint(300, 100))
    plot.grab()


@pytest.mark.parametrize("width", [40, 220, 1200])
@pytest.mark.parametrize("most", [1, 128, 60_000])
def test_every_size_of_plot_and_model_is_painted(plot: MissRatioPlot, width: int, most: int) -> None:
    plot.resize(width, 150)
    told = report(tier(slots=most // 2, most=most), curve_slots=(0, max(1, most)), curve_hit_rates=(0.0, 1.0))
    for known in (forecast(told), NO_FORECAST):
        plot.show_tier(told.tiers[0], known, most, None)
        assert not plot.grab().isNull()


# --- the card -----------------------------------------------------------------------------------------


def test_the_card_asks_for_another_size_and_tells_what_came_of_it(card: CacheCard, qtbot: QtBot) -> None:
    card.show_report(report())
    assert "60%" in _texts(card)
    assert "55% overall" in _texts(card)
    assert "LFRU" in card.caption.text()
    with qtbot.waitSignal(card.resize_wanted) as wanted:
        card.plot.chosen.emit(2000)
    assert wanted.args == ["vram", 2000]
    assert number(2000, 0) in card.size_field.outcome
    card.show_report(report(tier(slots=1750)))
    had, has, asked = (number(slots, 0) for slots in (1000, 1750, 2000))
    assert all(slots in card.size_field.outcome for slots in (had, has, asked))
    for _ in range(5):
        card.show_report(report(tier(slots=1750, recent_hit_rate=0.75), steps_per_s=26.0))
    assert "hits 75%, was 60%" in card.size_field.outcome
    assert "26.0 tokens/s, was 20.0" in card.size_field.outcome
    assert "predicted" in card.size_field.outcome
    with qtbot.waitSignal(card.resize_wanted) as wanted:
        card.size_field.undo.click()
    assert wanted.args == ["vram", 1000]


def test_a_size_that_is_not_given_is_said(card: CacheCard) -> None:
    card.show_report(report())
    card.plot.chosen.emit(5000)
    card.show_report(report())  # written before the engine read the command
    assert number(5000, 0) in card.size_field.outcome
    card.show_report(report())
    assert f"{number(1000, 0)} experts: no room for {number(5000, 0)}" in card.size_field.outcome
    card.plot.chosen.emit(990)
    card.show_report(report())
    card.show_report(report())
    assert "990" in card.size_field.outcome


def test_the_field_and_the_handle_agree(card: CacheCard, qtbot: QtBot) -> None:
    card.show_report(report())
    card.size_field.field.setValue(1500)
    assert card.plot.slots == 1500
    with qtbot.waitSignal(card.resize_wanted) as wanted:
        card.size_field.button.click()
    assert wanted.args == ["vram", 1500]
    card.plot.setFocus()
    QTest.keyClick(card.plot, Qt.Key.Key_Right)
    assert card.size_field.field.value() == card.plot.slots


def test_two_tiers_have_two_rates_and_a_choice(card: CacheCard, qtbot: QtBot) -> None:
    ram = tier("ram", slots=3000, recent_hit_rate=0.9, policy="lru", is_adaptive=False)
    card.show_report(report(tier(), ram), free_ram=0)
    assert "60%" in _texts(card)
    assert "90%" in _texts(card)
    card._buttons["ram"].click()
    assert card.tier == ram
    with qtbot.waitSignal(card.resize_wanted) as wanted:
        card.plot.chosen.emit(2500)
    assert wanted.args == ["ram", 2500]


@pytest.mark.parametrize(
    ("place", "said"), [("ram", "are in RAM"), ("emulated:slow-link#0", "graphics card's memory"), ("?", "graphics")]
)
def test_without_a_cache_it_says_so_calmly(card: CacheCard, place: str, said: str) -> None:
    card.show_report(without_cache(place))
    assert said in _texts(card)
    assert card.plot.isHidden()
    assert card.size_field.isHidden()


def test_the_engine_dies_and_another_model_comes(card: CacheCard) -> None:
    card.show_report(report())
    card.plot.chosen.emit(2000)
    card.show_report(None)
    assert card.plot.isHidden()
    assert card.rows["vram"].line.values == ()
    card.show_report(report(tier(slots=8, most=240)))
    assert card.size_field.outcome == ""
    assert card.plot.slots == 8


def test_nonsense_is_shown_as_little(card: CacheCard, qtbot: QtBot) -> None:
    mad = report(
        tier(slots=-5, most=-9, recent_hit_rate=math.nan, policy="<b>x</b>" * 50, shadows=(PolicyRate("", math.inf),)),
        steps_per_s=math.inf,
        curve_hit_rates=(math.nan,),
        memory=(MemoryPart("ram", "total", -5),),
    )
    cards = (card, PoliciesCard(), PredictionCard(), MemoryCard())
    for each in cards:
        qtbot.addWidget(each)
        each.show_report(mad)
        each.grab()
        each.show_report(None)
        each.grab()


def test_a_recorded_cache_cannot_be_resized(card: CacheCard, qtbot: QtBot) -> None:
    card.is_recorded = True
    card.show_report(report())
    assert card.size_field.isHidden()
    assert not card.plot.isEnabled()
    with qtbot.assertNotEmitted(card.resize_wanted):
        card.plot.chosen.emit(5)


# --- the others ---------------------------------------------------------------------------------------


def test_policies_stand_side_by_side(qtbot: QtBot) -> None:
    card = PoliciesCard()
    qtbot.addWidget(card)
    card.show_report(report())
    texts = _texts(card).split("\n")
    assert texts[texts.index("LFRU") + 1] == "58% in use"
    assert texts[texts.index("LFU") + 1] == "55%"
    card.show_report(without_cache())
    assert card.isHidden()


def test_prefetching_tells_right_from_wasted(qtbot: QtBot) -> None:
    card = PredictionCard()
    qtbot.addWidget(card)
    card.show_report(report())
    said = "\n".join(card.texts)
    assert "next layer's gate, one layer ahead" in said
    assert "2.1 ms" in said
    assert "of 400 prefetched, 75% used, 15% wasted" in said
    card.show_report(report(tier(prefetched=0), adopted=""))
    assert "None is in use" in "\n".join(card.texts)


def test_memory_adds_up_with_everybody_elses(qtbot: QtBot) -> None:
    card = MemoryCard()
    qtbot.addWidget(card)
    card.show_report(report(), ram_used=5000 * MIB, ram_total=16000 * MIB)
    texts = _texts(card).split("\n")
    for name, amount in (("window and other programs", 4000), ("free", 11000), ("weights", 500)):
        assert texts[texts.index(name) + 1] == memory(amount * MIB)


def _steps(count: int) -> np.ndarray:
    steps = np.zeros(count, STEP)
    steps["name"], steps["tokens"] = DECODE, 1
    steps["start_ns"] = np.arange(count) * 10_000_000
    steps["end_ns"] = steps["start_ns"] + 8_000_000
    steps["hits"], steps["fetched"], steps["on_cpu"], steps["h2d_bytes"] = 250, 30, 104, 3 * MIB
    steps["late"] = 5  # of the misses: fetched or on the CPU, so they are not counted again
    return steps


def test_a_token_is_the_mean_of_decode_steps(qtbot: QtBot) -> None:
    history = History()
    assert token_figures(history) is None
    steps = _steps(50)
    steps["name"][:10] = PREFILL
    history.add_steps(steps)
    figures = token_figures(history)
    assert (figures.tokens, figures.used, figures.joules) == (40, 384.0, None)
    assert figures.took_s == pytest.approx(0.008)
    card = TokenCard()
    qtbot.addWidget(card)
    card.show_figures(figures, None)
    shown = {key: label.text() for key, label in card.values.items()}
    assert shown["used"] == "384"
    assert shown["cpu"] == "104"
    assert shown["took"] == "8.0 ms"
    assert shown["energy"] == "not available here"
    card.show_figures(replace(figures, joules=4.125), 120.0)
    assert card.values["energy"].text().startswith("4.1")
    card.grab()


ANY_INT = st.integers(-(2**70), 2**70)
ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True)
TIERS = st.builds(
    TierReport,
    tier=st.sampled_from(["vram", "ram"]),
    slots=ANY_INT,
    most_slots=ANY_INT,
    record_bytes=ANY_INT,
    hits=ANY_INT,
    lookups=ANY_INT,
    recent_hit_rate=ANY_FLOAT,
    policy=st.text(max_size=9),
    is_adaptive=st.booleans(),
    shadows=st.lists(st.builds(PolicyRate, st.text(max_size=5), ANY_FLOAT), max_size=20).map(tuple),
    arriving=ANY_INT,
    evictions=ANY_INT,
    prefetched=ANY_INT,
    prefetches_used=ANY_INT,
    prefetches_wasted=ANY_INT,
)
REPORTS = st.builds(
    CacheReport,
    tiers=st.lists(TIERS, max_size=4).map(tuple),
    curve_slots=st.lists(ANY_INT, max_size=6).map(tuple),
    curve_hit_rates=st.lists(ANY_FLOAT, max_size=6).map(tuple),
    steps_per_s=ANY_FLOAT,
    lookups_per_step=ANY_FLOAT,
    hit_s=ANY_FLOAT,
    miss_s=ANY_FLOAT,
    adopted=st.text(max_size=5),
    ahead=ANY_INT,
    predictors=st.lists(
        st.builds(PredictorRate, st.text(max_size=5), ANY_INT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT, ANY_FLOAT), max_size=3
    ).map(tuple),
    memory=st.lists(
        st.builds(
            MemoryPart, st.sampled_from(["ram", "cuda:0"]), st.sampled_from(["total", "free", "kv", "?"]), ANY_INT
        ),
        max_size=8,
    ).map(tuple),
)


@settings(max_examples=60)
@given(REPORTS)
def test_nonsense_becomes_something_that_can_be_drawn(nonsense: CacheReport) -> None:
    clean = sound(nonsense)
    known = forecast(clean)
    for each in clean.tiers:
        assert 0 <= each.slots <= each.most_slots
        assert 0 <= each.hits <= each.lookups
        assert each.slots <= room_slots(clean, each, None) <= each.most_slots
        assert all(0 <= policy.hit_rate <= 1 or policy.hit_rate == -1 for policy in policies(each))
    for shares in (known.hit_rates, known.lru_rates):
        assert np.isfinite(shares).all()
        assert (shares >= 0).all()
        assert (shares <= 1).all()
    assert np.isfinite(known.tokens_per_s).all()
    for amounts, total in memory_places(clean.memory).values():
        assert sum(amounts.values()) == total
        assert all(nbytes >= 0 for nbytes in amounts.values())


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(0, 1), st.integers(1, 999), st.booleans())
@example([0.0, 1.0, 1.0], 0.5, 1, False)
@example([2.3e-308, 2.3e-308, 1.0], 0.5, 1, False)
def test_the_expected_rate_goes_through_the_measured_one_and_never_falls(
    rates: list[float], measured: float, slots: int, adaptive: bool
) -> None:
    sizes = np.linspace(0, 1000, len(rates)).round().astype(int)
    told = report(
        tier(slots=slots, most=1000, recent_hit_rate=measured, is_adaptive=adaptive),
        curve_slots=tuple(sizes.tolist()),
        curve_hit_rates=tuple(sorted(rates)),
    )
    known = forecast(sound(told))
    now = known.hit_rate_at(slots)
    assert now is not None
    assert now >= measured - 1e-9
    if sorted(rates)[0] > 0 or adaptive:
        assert now == pytest.approx(measured, abs=1e-6)
    assert (np.diff(known.hit_rates) >= -1e-12).all()
    assert known.slots[-1] == 1000


def test_where_a_miss_is_as_cheap_as_a_hit_nothing_is_predicted() -> None:
    known = forecast(report(hit_s=2e-4, miss_s=1e-4))
    assert known.gains_nothing
    assert known.tokens_per_s_at(3000) is None
    assert known.hit_rate_at(3000) is not None


def test_a_popular_few_are_worth_more_than_a_cyclic_lru() -> None:
    """LRU hits nothing until all fit; who keeps the popular ones hits in proportion all the same."""
    told = report(
        tier(slots=72, most=240, recent_hit_rate=0.33, policy="static"),
        curve_slots=(0, 200, 210, 240),
        curve_hit_rates=(0.0, 0.0, 1.0, 1.0),
    )
    known = forecast(told)
    assert known.hit_rate_at(72) == pytest.approx(0.33, abs=1e-3)
    half = known.hit_rate_at(156)
    assert half is not None
    assert half == pytest.approx(0.66, abs=0.02)


def test_room_ends_where_memory_does() -> None:
    told = report()
    assert room_slots(told, told.tiers[0]) == 1000 + 750
    assert room_slots(told, tier("ram"), free_ram=10 * MIB) == 1005
    assert room_slots(told, tier("ram")) == 6144


def test_the_policy_that_decides_is_among_its_shadows_once() -> None:
    names = [each.name for each in policies(tier())]
    assert names == ["lfru", "lfu", "lru", "random"]
    assert next(each.name for each in policies(tier(policy="static"))) == "static"


def test_parts_of_memory_fill_their_place() -> None:
    places = memory_places(report().memory)
    assert places["cuda:0"][0][FREE] == 1500 * MIB
    assert places["ram"] == ({"experts": 700 * MIB, "other": 300 * MIB, FREE: 0}, 1000 * MIB)
    short = (MemoryPart("ram", "kv", 5), MemoryPart("ram", "total", 3))
    assert memory_places(short)["ram"] == ({"kv": 5, FREE: 0}, 5)


@given(st.integers(0, 6000), st.integers(1, 6144), st.floats(0, 1), st.floats(0, 1), st.floats(1e-5, 0.1))
@example(0, 6144, 0.0, 0.0, 0.0625)  # all experts have room, and still none was hit
def test_ram_beneath_vram_is_predicted_from_what_vram_misses(
    vram: int, ram: int, vram_hits: float, ram_hits: float, miss_s: float
) -> None:
    of_ram = tier("ram", slots=ram, recent_hit_rate=ram_hits, miss_s=miss_s)
    found = forecast(sound(report(tier(slots=vram, recent_hit_rate=vram_hits), of_ram)), 1)
    assert found.hit_rate_at(ram) == pytest.approx(ram_hits, abs=1e-6)
    assert (np.diff(found.hit_rates) >= -1e-12).all()
    assert (np.diff(found.tokens_per_s) >= -1e-9).all()
    assert (found.lru_rates[found.slots <= vram] <= 1e-9).all()  # what VRAM holds, nobody asks RAM for
    assert found.tokens_per_s_at(ram) == pytest.approx(20.0, rel=1e-6)
    assert forecast(sound(report(tier(), tier("ram", miss_s=0.0))), 1).tokens_per_s_at(3000) is None


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


DOWN, UP = Qt.SortOrder.DescendingOrder, Qt.SortOrder.AscendingOrder


def random_map(rows: int, columns: int, seed: int) -> ExpertMap:
    """Uses, hits and places by chance; some experts do not exist."""
    rng = np.random.default_rng(seed)
    cells = rows * columns
    uses = rng.integers(0, 1000, cells).astype(np.uint32)
    hits = (uses * rng.uniform(0, 1, cells)).astype(np.uint32)
    heat, places = rng.integers(0, 256, cells).astype(np.uint8), rng.integers(0, 16, cells).astype(np.uint8)
    parts = (heat, places, uses, hits, rng.integers(0, 300, cells).astype(np.uint32))
    names = ("heat", "places", "uses", "hits", "last_step")
    packed = {name: pack(part) for name, part in zip(names, parts, strict=True)}
    return ExpertMap(
        layers=tuple(range(3, rows + 3)),
        experts=columns,
        step=300,
        hottest=42.0,
        record_bytes=(2**20,) * rows,
        **packed,
    )


def column_of(table: ExpertTable, column: int) -> list[str]:
    return [table.data(table.index(row, column)) for row in range(table.rowCount())]


@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31), st.sampled_from(range(7)), st.sampled_from([UP, DOWN])
)
def test_it_lists_every_expert_once_in_any_order(
    qapp: QApplication, rows: int, columns: int, seed: int, column: int, order: Qt.SortOrder
) -> None:
    data = map_data(random_map(rows, columns, seed))
    table = ExpertTable()
    table.show_data(data)
    table.sort(column, order)
    pairs = list(zip(column_of(table, LAYER), column_of(table, EXPERT), strict=True))
    there = [(str(data.layers[row]), str(expert)) for row, expert in np.argwhere(data.exists).tolist()]
    assert sorted(pairs) == sorted(there)
    if column == USES:
        uses = [int(text.replace(",", "").replace("\u202f", "")) for text in column_of(table, USES)]
        assert uses == sorted(uses, reverse=order == DOWN)
    table.show_data(None)
    assert table.rowCount() == 0


def test_the_card_shows_the_map_or_the_table(qtbot: QtBot) -> None:
    card = ExpertCard()
    qtbot.addWidget(card)
    card.resize(360, 400)
    card.show_event(expert_map())
    assert card.view.isVisibleTo(card)
    assert card.legend.isVisibleTo(card)
    assert "0 to 9.00 recent uses" in card.legend.accessibleName()
    assert not card.grab().isNull()
    card.as_table.setChecked(True)
    assert card.table.isVisibleTo(card)
    assert not card.view.isVisibleTo(card)
    assert card.experts.rowCount() == 24
    assert not card.grab().isNull()
    card.show_event(None)
    assert not card.table.isVisibleTo(card)
    assert not card.as_table.isVisibleTo(card)


@pytest.mark.parametrize("hottest", [0.0, 12.5, -3.0, math.inf, math.nan])
@pytest.mark.parametrize("width", [90, 240, 700])
def test_the_key_fits_any_width(qtbot: QtBot, width: int, hottest: float) -> None:
    legend = MapLegend()
    qtbot.addWidget(legend)
    legend.show_data(map_data(dataclasses.replace(random_map(4, 8, 3), hottest=hottest)))
    legend.resize(width, legend.heightForWidth(width))
    assert not legend.grab().isNull()
    for name in ("in VRAM", "in RAM", "only on disk"):
        assert name in legend.accessibleName()
    assert legend.heightForWidth(90) > legend.heightForWidth(700)


def test_a_press_on_the_handle_and_no_move_changes_nothing(plot: MissRatioPlot, qtbot: QtBot) -> None:
    plot.set_slots(1001)
    plot.put_back()
    handle = plot.view.mapViewToScene(QPointF(1000, 0.5)).toPoint()
    with qtbot.assertNotEmitted(plot.chosen):
        QTest.mouseClick(plot.viewport(), LEFT, NO_KEYS, handle + QPoint(2, 0))
    assert not plot.is_moved


def test_the_order_stays_while_the_map_goes_on(qapp: QApplication) -> None:
    table = ExpertTable()
    table.show_data(map_data(expert_map()))
    table.sort(USES, DOWN)
    assert table.data(table.index(0, EXPERT)) == "7"
    table.show_data(map_data(dataclasses.replace(expert_map(), step=900)))
    assert table.data(table.index(0, EXPERT)) == "7"
    assert table.data(table.index(0, PLACE)) == "in RAM"
    assert table.data(table.index(table.rowCount() - 1, HITS)) == "–"
