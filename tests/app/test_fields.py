"""Scrolling a page changes none of its fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, QPointF
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QScrollArea, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

import app
from app.services.api_server import ApiServer
from app.services.endpoints import Endpoints
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.settings import SettingsPage
from app.widgets.fields import ComboBox, DoubleSpinBox, Slider, SpinBox
from tests.app.scripted_engine import ScriptedEngine

Field = ComboBox | SpinBox | DoubleSpinBox | Slider


def _value(field: Field) -> float:
    return field.currentIndex() if isinstance(field, ComboBox) else field.value()


def _turn_wheel(field: QWidget, steps: int) -> None:
    """Turns the wheel over the middle of a field, as the system tells the window of it."""
    window = field.window()
    at = field.mapTo(window, field.rect().center())
    QTest.wheelEvent(window.windowHandle(), QPointF(at), QPoint(0, 120 * steps))


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
    before = _value(field)
    for steps in (-1, 1):
        area.verticalScrollBar().setValue(1400)
        at = area.verticalScrollBar().value()
        _turn_wheel(field, steps)
        assert (area.verticalScrollBar().value() - at) * steps < 0
        assert _value(field) == before


@pytest.fixture
def page(qtbot: QtBot, settings: Settings, theme: ThemeController) -> Iterator[SettingsPage]:
    server = ApiServer(ScriptedEngine(), settings)  # type: ignore[arg-type]
    result = SettingsPage(settings, theme, server, Endpoints(settings))
    qtbot.addWidget(result)
    result.resize(1000, 800)
    result.show()
    yield result
    result.close_down()
    server.close()


def test_scrolling_the_settings_changes_none(page: SettingsPage) -> None:
    fields = [field for kind in (ComboBox, SpinBox, Slider) for field in page.findChildren(kind)]
    assert len(fields) > 6
    before = [_value(field) for field in fields]
    area = page.findChild(QScrollArea)
    assert area is not None
    for field in fields:
        for steps in (-1, 1):
            area.ensureWidgetVisible(field)
            _turn_wheel(field, steps)
    assert [_value(field) for field in fields] == before


def test_the_window_has_no_other_fields() -> None:
    folder = Path(app.__file__).parent
    own = re.compile(r"\bQ(ComboBox|SpinBox|DoubleSpinBox|Slider|Dial|DateEdit|TimeEdit|DateTimeEdit)\(")
    found = [str(path.relative_to(folder)) for path in folder.rglob("*.py") if own.search(path.read_text("utf-8"))]
    assert not found, "the wheel would change these while a page is scrolled"
