"""The Tune page's pictures, with machines that are ordinary, strange and half unknown."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import QPoint, QPointF, QSize, Qt
from PySide6.QtGui import QImage
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QScrollArea, QToolTip, QWidget

from app.models.plan_table import BAR, NAME, PREDICTED, TIMED, PlanTable
from app.views.tune.machine_boxes import machine_boxes
from app.views.tune.page import page_report
from app.views.tune.phrases import tier_bars
from app.views.tune.run_card import RaceView
from app.widgets.machine_picture import MachinePicture
from app.widgets.plan_bars import PlanBars, adding_up
from app.widgets.roofline_plot import RooflinePlot
from engine.hardware.machine import Origin
from engine.planner.plan_parts import RooflinePicture, RooflinePoint
from engine.tuning.machine_state import MachineLook
from tests.app import tuning_results as made

GIB = 2**30
ABSURD = "NVIDIA " + "Very Long Name " * 20 + "\N{SNOWMAN}<b>&amp;</b>"


def _painted(widget: QWidget, size: QSize) -> QImage:
    """The widget drawn, off the screen; fails if nothing at all was drawn."""
    widget.resize(size)
    image = widget.grab().toImage()
    corner = image.pixel(0, 0)
    assert any(image.pixel(x, y) != corner for x in range(0, image.width(), 3) for y in range(0, image.height(), 3))
    return image


LOOKS = {
    "none": lambda: made.look(),
    "one": lambda: made.look(made.gpu()),
    "never measured": lambda: made.look(made.gpu(), measured=False),
    "many": lambda: made.look(*[made.gpu()] * 9),
    "absurd": lambda: made.look(made.gpu(ABSURD)),
    "silent driver": lambda: made.look(
        made.gpu(free_bytes=None, driver=None, pcie_generation=None, pcie_width=None, pcie_width_now=None),
        measured=False,
    ),
    "integrated": lambda: made.look(made.gpu("Intel UHD", is_integrated=True), measured=False),
}


@pytest.mark.parametrize("name", LOOKS)
def test_every_machine_is_drawn_and_told(qapp: QApplication, name: str) -> None:
    look = LOOKS[name]()
    picture = MachinePicture()
    picture.show_machine(*machine_boxes(look, {}))
    for width in (340, 640, 1900):
        _painted(picture, QSize(width, picture.height()))
    said = picture.accessibleDescription()
    assert "CPU" in said
    assert "RAM" in said
    assert "Disk" in said
    assert ("No graphics card" in said) == (look.profile.gpu is None)
    picture.deleteLater()


def test_boxes_lie_in_the_picture_and_apart(qapp: QApplication) -> None:
    picture = MachinePicture()
    picture.show_machine(*machine_boxes(made.look(made.gpu()), {}))
    for width in (420, 600, 660, 1200):
        picture.resize(width, picture.height())
        areas = list(picture._areas().values())
        assert all(picture.rect().contains(area.toRect()) for area in areas)
        assert not any(one.intersects(other) for one in areas for other in areas if one is not other)
    picture.deleteLater()


def test_numbers_say_where_they_come_from(qapp: QApplication) -> None:
    boxes, links = machine_boxes(made.look(made.gpu(), measured=False), {})
    assumed = next(link for link in links if link.part == "disk")
    assert not assumed.is_measured
    assert assumed.labels[0].text.startswith("about ")
    assert "assumed" in assumed.spoken
    boxes, links = machine_boxes(made.look(made.gpu()), {})
    measured = next(link for link in links if link.part == "disk")
    assert measured.is_measured
    assert "measured" in measured.spoken
    assert "about" not in measured.spoken
    gpu = next(box for box in boxes if box.part == "gpu")
    assert all(line.origin for line in gpu.lines)


def test_hover_and_keys_tell_the_same(qapp: QApplication, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(QToolTip, "showText", lambda _at, text, _widget: shown.append(text))
    picture = MachinePicture()
    picture.show_machine(*machine_boxes(made.look(made.gpu()), {}))
    picture.resize(700, picture.height())
    hovered = picture.spoken_at(QPointF(picture._areas()["cpu"].center()))
    assert "Ryzen" in hovered
    assert "reported by the driver" in hovered
    picture.show()
    picture.setFocus()
    for _ in range(2):
        QTest.keyClick(picture, Qt.Key.Key_Right)
    assert hovered in shown
    assert picture.accessibleName().partition(":")[0] == shown[-1].partition("\n")[0]
    picture.close()
    picture.deleteLater()


@given(st.lists(st.integers(0, 2**42), min_size=1, max_size=9))
def test_amounts_as_written_add_up(amounts: list[int]) -> None:
    tenths = adding_up(amounts)
    exact = [amount * 10 / GIB for amount in amounts]
    assert sum(tenths) == round(sum(exact))
    assert all(abs(one - other) <= 1 for one, other in zip(tenths, exact, strict=True))


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_bars_name_every_part(qapp: QApplication, model: str) -> None:
    look = made.look(made.gpu()) if model == "qwen3-30b-a3b" else made.look()
    bars = PlanBars()
    tiers = tier_bars(made.plan(look, model), look)
    bars.show_tiers(tiers)
    heights = [_painted(bars, QSize(width, bars.heightForWidth(width))).height() for width in (280, 900)]
    assert heights[0] >= heights[1]  # labels wrap
    for tier in tiers:
        assert tier.name in bars.accessibleDescription()
        for part in tier.parts:
            assert (part.name in bars.accessibleDescription()) or part.amount == 0
    bars.deleteLater()


@pytest.mark.parametrize(
    "picture",
    [
        RooflinePicture(0.0, 0.0),
        RooflinePicture(1e12, 5e10),
        RooflinePicture(1e12, 5e10, 4e13, 2.7e11, 1.2e10, points=(RooflinePoint("decode", 3.4, 1.4e11, "CPU memory"),)),
        RooflinePicture(
            1e12, 5e10, points=(RooflinePoint("x", float("inf"), 1e12, "?"), RooflinePoint("y", 0, 0, "?"))
        ),
    ],
)
def test_any_roofline_is_drawn(qapp: QApplication, picture: RooflinePicture) -> None:
    plot = RooflinePlot()
    plot.show_picture(picture)
    plot.resize(300, 220)
    plot.grab()
    if picture.cpu_flops:
        _painted(plot, QSize(300, 220))
        assert "CPU" in plot.accessibleDescription()
    plot.show_picture(None)
    assert plot.accessibleDescription() == ""
    plot.deleteLater()


def test_the_wheel_over_a_chart_scrolls_the_page(qapp: QApplication) -> None:
    page, scroll = QWidget(), QScrollArea()
    plot = RooflinePlot(page)
    plot.show_picture(RooflinePicture(1e12, 5e10))
    plot.setGeometry(0, 0, 300, 900)
    page.resize(300, 900)
    scroll.setWidget(page)
    scroll.resize(300, 300)
    scroll.show()
    for x in (20, 150):  # over the axis, and over the plot
        before = scroll.verticalScrollBar().value()
        QTest.wheelEvent(scroll.windowHandle(), QPointF(x, 150), QPoint(0, -120))
        assert scroll.verticalScrollBar().value() > before
    scroll.close()
    scroll.deleteLater()


def test_the_race_as_a_table(qapp: QApplication) -> None:
    table = PlanTable()
    table.show_contestants(made.CONTESTANTS)
    assert table.rowCount() == 3
    assert table.data(table.index(0, TIMED)) == ""
    table.show_doing(made.CONTESTANTS[1].name, "being timed", 11.5)
    assert table.data(table.index(1, TIMED)) == "11.5…"
    table.show_timed(made.timed(made.CONTESTANTS[1], 9.7))
    assert table.data(table.index(1, TIMED)) == "9.7"
    table.show_result(made.result())
    rows = table.rows
    assert rows[0].is_winner
    assert rows[-1].problem
    assert table.data(table.index(2, TIMED)) == "failed"
    spoken = table.data(table.index(2, NAME), Qt.ItemDataRole.AccessibleTextRole)
    assert "7.9 GB are needed" in spoken
    assert "predicted" in spoken
    view = RaceView(table)
    for width in (380, 1000):
        _painted(view, QSize(width, view.height()))
    assert view.columnWidth(BAR) > 0
    assert table.headerData(PREDICTED, Qt.Orientation.Horizontal) == "Predicted"
    table.show_winner(made.CONTESTANTS[2].name)
    assert [row.is_winner for row in table.rows] == [False, True, False]
    view.deleteLater()
    table.deleteLater()


def test_the_report_holds_all_and_bears_gaps() -> None:
    look = made.look(made.gpu())
    text = page_report(look, made.plan(look), made.result(look))
    for words in ("RTX 4060", "58.0 GB/s", "measured on this machine", "VRAM", "24.6", "13.9", "7.9 GB are needed"):
        assert words in text
    assert page_report(None, None, None) == ""
    assert "No graphics card" in page_report(made.look(measured=False), None, None)


def _unused(look: MachineLook) -> MachineLook:
    return replace(look, device="")


def test_a_card_that_the_engine_does_not_use_is_said() -> None:
    look = _unused(made.look(made.gpu()))
    gpu = next(box for box in machine_boxes(look, {})[0] if box.part == "gpu")
    assert any("not used" in line.text for line in gpu.lines)
    assert look.profile.origins["gpu.memory_bytes"] is Origin.DRIVER
