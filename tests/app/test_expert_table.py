"""The expert map's key and its table."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.views.monitor.engine_cards import ExpertCard
from app.widgets.expert_map.data import map_data
from app.widgets.expert_map.view import EXPERT, LAYER, USES, ExpertTable, MapLegend
from engine.protocol import ExpertMap
from engine.telemetry.records import pack
from tests.app.recorded import expert_map

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
