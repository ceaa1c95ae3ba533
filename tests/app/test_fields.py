"""Scrolling a page changes none of its fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtWidgets import QScrollArea, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

import app
from app.widgets.fields import ComboBox, DoubleSpinBox, Slider, SpinBox
from tests.app.wheel import Field, turn_wheel, value_of


def _combo() -> ComboBox:
    combo = ComboBox()
    combo.addItems(["one", "two", "three"])
    combo.setCurrentIndex(1)
    return combo


@pytest.mark.parametrize("make", [_combo, SpinBox, DoubleSpinBox, Slider])
@pytest.mark.parametrize("has_focus", [False, True])
def test_the_wheel_scrolls_the_page_and_not_a_field(qtbot: QtBot, make: Callable[[], Field], has_focus: bool) -> None:
    area, inside = QScrollArea(), QWidget()
    qtbot.addWidget(area)
    field = make()
    layout = QVBoxLayout(inside)
    layout.addWidget(field)
    inside.setMinimumHeight(3000)
    area.setWidget(inside)
    area.setWidgetResizable(True)
    area.resize(300, 200)
    area.show()
    qtbot.waitExposed(area)
    if has_focus:
        field.setFocus()
    before = value_of(field)
    for steps in (-1, 1):
        area.verticalScrollBar().setValue(1400)
        at = area.verticalScrollBar().value()
        turn_wheel(field, steps)
        assert (area.verticalScrollBar().value() - at) * steps < 0
        assert value_of(field) == before


def test_the_window_has_no_other_fields() -> None:
    folder = Path(app.__file__).parent
    own = re.compile(r"\bQ(ComboBox|SpinBox|DoubleSpinBox|Slider|Dial|DateEdit|TimeEdit|DateTimeEdit)\(")
    found = [str(path.relative_to(folder)) for path in folder.rglob("*.py") if own.search(path.read_text("utf-8"))]
    assert not found, "the wheel would change these while a page is scrolled"
