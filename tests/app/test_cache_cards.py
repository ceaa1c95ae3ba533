"""The cache's cards: what they say, the handle that resizes, and an engine that dies or talks nonsense in between."""

import math
from dataclasses import replace

import numpy as np
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel, QWidget
from pytestqt.qtbot import QtBot

from app.models.cache_figures import NO_FORECAST, TokenFigures, forecast, token_figures
from app.services.history.history import History
from app.views.monitor.cache_card import CacheCard
from app.views.monitor.engine_cards import MemoryCard, TokenCard
from app.views.monitor.prediction_card import PoliciesCard, PredictionCard
from app.widgets.miss_ratio_plot import MissRatioPlot
from app.widgets.quantities import memory, number
from engine.protocol import MemoryPart, PolicyRate
from engine.telemetry.lanes import DECODE, PREFILL
from engine.telemetry.records import STEP
from tests.app.cache_reports import MIB, report, tier, without_cache

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
    each: CacheCard | PoliciesCard | PredictionCard | MemoryCard
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
    assert figures is not None
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


def test_nothing_decoded_is_a_dash(qtbot: QtBot) -> None:
    card = TokenCard()
    qtbot.addWidget(card)
    card.show_figures(None, None)
    assert {card.values[key].text() for key in ("used", "hit", "took")} == {"–"}
    card.show_figures(TokenFigures(1, 1, False, {"hit": 0.0, "fetched": 0.0, "cpu": 0.0}, 0.0, 0.0, 0.0, None), None)
    card.grab()
