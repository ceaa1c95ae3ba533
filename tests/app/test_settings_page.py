"""Settings take effect as they are made."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QAbstractButton,
    QComboBox,
    QLabel,
    QPushButton,
    QScrollArea,
    QSlider,
    QSpinBox,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.services.api_server import ApiServer
from app.services.data_folder import planned_change
from app.services.endpoints import Endpoints
from app.services.planning import PlanAnswer, PlanQuestion
from app.services.settings import Settings
from app.services.tools import Tools
from app.theme import DARK, ThemeController
from app.views.settings.few_rows import LicencesDialog, version
from app.views.settings.page import SettingsPage
from app.widgets.fields import ComboBox, Slider, SpinBox
from app.widgets.scaffold import WrappedLabel
from engine.checkpoint.catalogue import catalogue_dir, read_catalogue
from engine.checkpoint.hub import HUGGINGFACE, endpoint_of
from engine.checkpoint.hub import http as tokens
from engine.common.config import EngineConfig
from engine.common.paths import data_dir, models_dir
from engine.tools.servers import with_values
from tests.app import tuning_results as made
from tests.app.scripted_engine import ScriptedEngine
from tests.app.wheel import turn_wheel, value_of

pytestmark = pytest.mark.usefixtures("plans_are_made_up")
PATIENCE_MS = 20_000


@pytest.fixture
def server(settings: Settings) -> Iterator[ApiServer]:
    with closing(ApiServer(ScriptedEngine(), settings)) as result:  # type: ignore[arg-type]
        yield result


@pytest.fixture
def page(qtbot: QtBot, settings: Settings, theme: ThemeController, server: ApiServer) -> Iterator[SettingsPage]:
    result = SettingsPage(settings, theme, server, Endpoints(settings), _tools(settings))
    qtbot.addWidget(result)
    result.resize(1000, 800)
    result.show()
    yield result
    result.close_down()


def _tools(settings: Settings) -> Tools:
    return Tools(settings, lambda: pytest.fail("no documents here"), lambda _job, _rows: None)


def _button(parent: QWidget, text: str) -> QPushButton:
    (found,) = [button for button in parent.findChildren(QPushButton) if button.text() == text]
    return found


def test_scrolling_the_settings_changes_none(page: SettingsPage) -> None:
    fields = [field for kind in (ComboBox, SpinBox, Slider) for field in page.findChildren(kind)]
    assert len(fields) > 6
    models = page.model.findChild(QComboBox)
    assert [models.itemText(i) for i in range(models.count())] == ["Starter"]
    before = [value_of(field) for field in fields]
    area = page.findChild(QScrollArea)
    assert area is not None
    for field in fields:
        for steps in (-1, 1):
            area.ensureWidgetVisible(field)
            turn_wheel(field, steps)
    assert [value_of(field) for field in fields] == before


def test_a_theme_and_a_text_size_are_applied_and_kept(
    page: SettingsPage, settings: Settings, theme: ThemeController
) -> None:
    _button(page, "Dark").click()
    assert theme.theme is DARK
    assert settings.theme == "dark"
    _button(page, "System").click()
    assert settings.theme == "system"
    slider = page.findChild(QSlider)
    slider.setValue(18)
    assert (theme.font_px, settings.font_px) == (18, 18)
    slider.setSliderDown(True)  # while it is dragged nothing moves under the pointer
    slider.setValue(14)
    assert theme.font_px == 18
    slider.setSliderDown(False)
    assert theme.font_px == 14


def test_a_default_model_that_is_gone_is_still_shown(
    settings: Settings, theme: ThemeController, server: ApiServer, qtbot: QtBot
) -> None:
    settings.default_model = "gone"
    page = SettingsPage(settings, theme, server, Endpoints(settings), _tools(settings))
    qtbot.addWidget(page)
    combo = page.model.findChild(QComboBox)
    assert combo.currentData() == "gone"


def test_what_the_engine_is_told_is_what_is_chosen_and_can_take_effect_at_once(
    page: SettingsPage, settings: Settings, qtbot: QtBot
) -> None:
    card = page.computing
    box = card.controls["threads"]
    assert box.text() == "Automatic"
    assert not card.apply.isEnabled()
    box.setValue(1)
    assert settings.engine("").threads == 1
    with qtbot.waitSignal(page.reload_wanted):
        card.apply.click()
    assert not card.apply.isEnabled()
    box.setValue(0)
    assert settings.engine("").threads is None
    settings.set("threads", 1)  # as another part of the window does
    assert box.value() == 1
    for key, value in (("speculation", "off"), ("kv_precision", "int8"), ("cache_policy", "lfu"), ("misses", "cpu")):
        choice = next(card.controls[key] for card in page.cards.values() if key in card.controls)
        assert getattr(settings.engine("starter"), key) == getattr(EngineConfig(""), key)
        choice.setCurrentIndex(choice.findData(value))
        choice.activated.emit(choice.currentIndex())
        assert getattr(settings.engine("starter"), key) == value
    assert _button(page, "Reload model").isEnabled()


def test_budgets_precision_and_device_are_set_by_mouse_with_the_predicted_speed(
    page: SettingsPage, settings: Settings, monkeypatch: pytest.MonkeyPatch, qtbot: QtBot
) -> None:
    asked: list[PlanQuestion] = []
    look = made.look(made.gpu())
    monkeypatch.setattr("app.views.settings.few_rows.look_at_machine", lambda _device: look)
    monkeypatch.setattr("app.services.planning.answer", lambda question: _planned(asked, question))
    card = page.computing
    vram, ram, precision, device = (card.controls[key] for key in ("vram_bytes", "ram_bytes", "precision", "device"))
    page.hide()  # it has looked at the real machine
    page.show()
    qtbot.waitUntil(lambda: vram.isEnabled() and "tokens/s" in card.predicted.text(), timeout=PATIENCE_MS)
    assert settings.engine("m") == EngineConfig("m")
    vram.setValue(vram.maximum() // 2)
    assert settings.engine("").vram_bytes == made.gpu().total_bytes // 2
    ram.setValue(8)
    precision.setCurrentIndex(precision.findData("int4"))
    precision.activated.emit(0)
    qtbot.waitUntil(lambda: asked[-1].config.precision == "int4", timeout=PATIENCE_MS)
    config = asked[-1].config
    assert (config.vram_bytes, config.ram_bytes) == (settings.engine("").vram_bytes, settings.engine("").ram_bytes)
    assert config.ram_bytes == look.probe.ram_bytes // 4
    device.setCurrentIndex(device.findData("cpu"))
    device.activated.emit(0)
    qtbot.waitUntil(lambda: asked[-1].config.device == "cpu", timeout=PATIENCE_MS)
    vram.setValue(vram.maximum())
    assert settings.engine("").vram_bytes is None
    with qtbot.waitSignal(page.timing_wanted):
        card.time.click()
    card.show_timing()
    assert not card.time.isEnabled()
    card.show_timed(21.5, "")
    assert "21.5 tokens/s" in card.predicted.text()
    assert card.time.isEnabled()
    card.show_timed(0.0, "There is no room for it.")
    assert card.bottleneck.text() == "There is no room for it."


def _planned(asked: list[PlanQuestion], question: PlanQuestion) -> PlanAnswer:
    asked.append(question)
    return PlanAnswer(question, made.plan(question.look))


def test_what_experts_set_is_folded_away_and_found_by_its_words(page: SettingsPage, settings: Settings) -> None:
    card = page.cards["For experts"]
    slots = card.controls["cache_slots"]
    assert not slots.isVisible()
    card.unfold.click()
    assert slots.isVisible()
    slots.setValue(12)
    assert settings.engine("").cache_slots == 12
    card.unfold.click()
    page.search.setText("--cache-slots")
    assert slots.isVisible()
    assert [name for name, each in page.cards.items() if each.isVisible()] == ["For experts"]
    page.search.setText("no such thing")
    assert not any(each.isVisible() for each in page.cards.values())
    page.search.clear()
    assert all(each.isVisible() for each in page.cards.values())
    assert not slots.isVisible()


def test_a_change_of_the_data_folder_is_planned_told_and_undone(page: SettingsPage, tmp_path: Path) -> None:
    page.data.plan(tmp_path / "new", copy=True)
    assert planned_change() is not None
    texts = [label.text() for label in page.data.findChildren(QLabel) if label.isVisible()]
    assert any("copied to" in text and str(tmp_path / "new") in text for text in texts)
    undo = _button(page.data, "Undo")
    assert undo.isVisible()
    undo.click()
    assert planned_change() is None
    assert not undo.isVisible()
    # One that cannot be used is told in its place.
    (tmp_path / "file").write_text("")
    page.data.plan(tmp_path / "file" / "folder", copy=False)
    texts = [label.text() for label in page.data.findChildren(QLabel) if label.isVisible()]
    assert any("cannot be written" in text for text in texts)
    assert str(data_dir()) in texts


def test_licences_name_the_font_s(qtbot: QtBot) -> None:
    dialog = LicencesDialog()
    qtbot.addWidget(dialog)
    (text,) = [child.toPlainText() for child in dialog.children() if hasattr(child, "toPlainText")]
    assert "SIL OPEN FONT LICENSE" in text
    assert "Apache License 2.0" in text
    assert version()


def test_the_keyboard_reaches_every_control_from_top_to_bottom(page: SettingsPage, qtbot: QtBot) -> None:
    page.activateWindow()
    controls = [
        widget
        for widget in page.findChildren(QWidget)
        if isinstance(widget, QAbstractButton | QComboBox | QSpinBox | QSlider)
        and widget.isVisible()
        and widget.isEnabled()
    ]
    reached: list[QWidget] = []
    page.setFocus()
    for _ in range(3 * len(controls)):
        page.focusNextChild()
        focused = page.focusWidget()
        if focused is not None and focused in controls and focused not in reached:
            reached.append(focused)
    unchecked_themes = {
        button
        for card in page.cards.values()
        for button in card.findChildren(QPushButton)
        if button.isCheckable() and not button.isChecked()
    }
    assert set(reached) >= set(controls) - unchecked_themes  # arrows lead from one theme to the next
    tops = [widget.mapTo(page, widget.rect().topLeft()).y() for widget in reached]
    assert [top // 100 for top in tops] == sorted(top // 100 for top in tops)
    assert page.focusPolicy() is not Qt.FocusPolicy.NoFocus
    assert not models_dir().exists()


def test_a_long_folder_is_shortened_in_its_middle_and_the_tooltip_says_it(
    settings: Settings,
    theme: ThemeController,
    server: ApiServer,
    qtbot: QtBot,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / ("a-" + "very" * 30 + "-long-name")
    monkeypatch.setenv("SWITCHYARD_HOME", str(folder))
    theme.set_font_px(20)
    page = SettingsPage(settings, theme, server, Endpoints(settings), _tools(settings))
    qtbot.addWidget(page)
    page.resize(640, 450)
    page.show()
    page.data.plan(folder / "new", copy=True)
    for whole in (str(data_dir()), str(folder / "new")):
        (label,) = [label for label in page.data.findChildren(WrappedLabel) if whole in label.text()]
        qtbot.waitUntil(lambda label=label: "…" in label.shown)
        metrics = label.fontMetrics()
        assert max(map(metrics.horizontalAdvance, re.split(r"[\s/-]", label.shown))) <= label.width()
        assert whole in label.toolTip()
        assert whole in label.accessibleName()
    page.close_down()


def test_a_shortened_word_comes_back_with_the_room(qtbot: QtBot) -> None:
    label = WrappedLabel("In /home/" + "long" * 10)
    qtbot.addWidget(label)
    label.resize(60, 200)
    label.show()
    assert label.shown.startswith("In /home/")
    assert "…" in label.shown
    assert label.toolTip() == label.text()
    label.resize(900, 200)
    assert label.shown == label.text()
    assert not label.toolTip()


def test_a_newer_catalogue_is_loaded_from_a_file(page: SettingsPage, qtbot: QtBot, tmp_path: Path) -> None:
    shipped = json.loads((catalogue_dir() / "catalogue.json").read_text(encoding="utf-8"))
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({"date": "2030-01-02", "models": shipped["models"][:1]}), encoding="utf-8")
    with qtbot.waitSignal(page.catalogue_changed):
        page.hub.use_catalogue(newer)
    assert "2030-01-02" in page.hub.catalogue.text()
    assert read_catalogue().date == "2030-01-02"
    newer.write_text("{}", encoding="utf-8")
    page.hub.use_catalogue(newer)
    qtbot.waitUntil(page.hub.trouble.isVisible)
    assert page.hub.load.isEnabled()
    assert read_catalogue().date == "2030-01-02"


def test_a_mirror_is_asked_unless_the_environment_names_another(
    page: SettingsPage,
    settings: Settings,
    server: ApiServer,
    monkeypatch: pytest.MonkeyPatch,
    qtbot: QtBot,
    theme: ThemeController,
) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)

    def enter(address: str) -> None:
        page.hub.address.setText(address)
        page.hub.address.editingFinished.emit()
        qtbot.waitUntil(lambda: not page.hub._doing.is_busy)

    for wrong in ("mirror", "http://mirror.example", "https://me:secret@mirror.example", "https://mirror.example?x=1"):
        enter(wrong)
        assert page.hub.trouble.isVisible(), wrong
        assert endpoint_of(HUGGINGFACE) == "https://huggingface.co"
    enter(" https://mirror.example/hf/ ")
    assert page.hub.trouble.isHidden()
    assert page.hub.address.text() == endpoint_of(HUGGINGFACE) == "https://mirror.example/hf"
    monkeypatch.setenv("HF_ENDPOINT", "https://other.example")
    assert endpoint_of(HUGGINGFACE) == "https://other.example"
    again = SettingsPage(settings, theme, server, Endpoints(settings), _tools(settings))
    qtbot.addWidget(again)
    assert not again.hub.address.isEnabled()
    monkeypatch.delenv("HF_ENDPOINT")
    enter("")
    assert endpoint_of(HUGGINGFACE) == "https://huggingface.co"


def test_a_token_is_removed_with_the_host_it_is_for_in_sight(
    page: SettingsPage, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(tokens, "_this_run", {"mirror.example": "hf_abc", "hub.example": "hf_def"})
    assert page.hub.tokens.isHidden()
    page.hide()
    page.show()
    qtbot.waitUntil(page.hub.tokens.isVisible)
    first, second = page.hub.tokens.buttons
    assert "hub.example" in first.accessibleName()
    with qtbot.waitSignal(page.token_forgotten):
        second.click()
    qtbot.waitUntil(lambda: len(page.hub.tokens.buttons) == 1)
    assert tokens.read_token("mirror.example") == ""
    assert tokens.read_token("hub.example") == "hf_def"
    page.hub.tokens.buttons[0].click()
    qtbot.waitUntil(page.hub.tokens.isHidden)
    assert "None" in page.hub.tokens_words.text()


def test_servers_with_tools_are_added_changed_and_removed(page: SettingsPage, settings: Settings) -> None:
    card = page.tools
    card.edit(None)
    dialog = card.dialog
    dialog.keep.click()
    assert dialog.trouble.text() == "Give the server a name."
    dialog.name.setText("files")
    dialog.command.setText("npx -y 'a server' \"")
    dialog.keep.click()
    assert "quote" in dialog.trouble.text()
    dialog.command.setText("npx -y 'a server'")
    dialog.variables.setPlainText("nothing")
    dialog.keep.click()
    assert "NAME=value" in dialog.trouble.text()
    dialog.variables.setPlainText("KEY=a=b\n")
    dialog.keep.click()
    (kept,) = card._tools.servers
    assert (kept.command, kept.args, kept.env) == ("npx", ("-y", "a server"), (("KEY", None),))
    assert with_values(kept).env == (("KEY", "a=b"),)
    assert not dialog.isVisible()
    card.edit(None)
    dialog = card.dialog
    dialog.pasted.setPlainText('{"mcpServers": {"files": {"command": "x"}}}')
    dialog.keep.click()
    assert "named files" in dialog.trouble.text()
    dialog.pasted.setPlainText('{"mcpServers": {"web": {"url": "https://example.org/mcp"}}}')
    dialog.keep.click()
    assert [each.name for each in card._tools.servers] == ["files", "web"]
    card.edit(kept)
    dialog = card.dialog
    assert (dialog.command.text(), dialog.pasted.isVisibleTo(dialog)) == ("npx -y 'a server'", False)
    # The value is not shown, and goes to no other command.
    assert dialog.variables.toPlainText() == "KEY=••••••••"
    dialog.command.setText("npx another")
    dialog.keep.click()
    assert "again" in dialog.trouble.text()
    dialog.command.setText("npx -y 'a server'")
    dialog.name.setText("notes")
    dialog.keep.click()
    assert [each.name for each in card._tools.servers] == ["notes", "web"]
    assert with_values(card._tools.servers[0]).env == (("KEY", "a=b"),)
    for button in card.rows.findChildren(QPushButton):
        if button.accessibleName() == "Remove web":
            button.click()
    assert [each.name for each in card._tools.servers] == ["notes"]
    card.switches["clock"].click()
    assert not settings.get("tool_clock", True)
    assert settings.get("tool_servers", list[Any]())[0]["name"] == "notes"
