"""The list of models over the chat: found, filtered, loaded, unloaded and made the default, by mouse and by key."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QSignalSpy
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

import app.services.library as library
from app.models.library import ROW_ROLE, ModelRow
from app.services.library import ModelSpeeds
from app.services.planning import PlanAnswer, PlanQuestion
from app.services.settings import Settings
from app.views.chat.chat_view import ChatView
from app.views.chat.model_picker import ModelPicker
from app.widgets.asking import model_of
from app.widgets.page import MODELS
from engine.checkpoint.library import LibraryEntry, Listing
from tests.app import tuning_results as made
from tests.app.scripted_engine import STARTER, ScriptedEngine

ENTRIES = (
    LibraryEntry("starter", Path("/models/starter"), bytes_on_disk=93_000_000, precision_words="bf16"),
    LibraryEntry(
        "Qwen3-30B", Path("/models/q"), bytes_on_disk=18_600_000_000, precision_words="Q4_K", measured_tokens_per_s=24.6
    ),
    LibraryEntry("Mixtral", Path("/lm/mixtral"), precision_words="bf16", origin="LM Studio"),
    LibraryEntry("broken", Path("/models/broken"), problem="config.json is missing."),
)


@pytest.fixture
def picker(page: ChatView, engine: ScriptedEngine, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> ModelPicker:
    """Opened by its keys; the starter is loaded."""
    monkeypatch.setattr(library, "_look_around", lambda _cancelled: Listing(ENTRIES))
    monkeypatch.setattr(ModelSpeeds, "ask", lambda *_: None)
    assert engine.model is not None
    engine.model = replace(engine.model, path="/models/starter")
    page.window().activateWindow()
    qtbot.waitUntil(page.composer.box.hasFocus)
    qtbot.keyClick(page, Qt.Key.Key_M, Qt.KeyboardModifier.ControlModifier)
    result = page.picker
    qtbot.waitUntil(lambda: result.rows.rowCount() == len(ENTRIES))
    return result


def _rows(picker: ModelPicker) -> list[ModelRow]:
    return [picker.rows.index(row, 0).data(ROW_ROLE) for row in range(picker.rows.rowCount())]


def _names(picker: ModelPicker) -> list[str]:
    return [row.entry.name for row in _rows(picker)]


def _choose(picker: ModelPicker, name: str) -> None:
    picker.list.setCurrentIndex(picker.rows.index(_names(picker).index(name), 0))


def test_it_lists_what_is_here_and_says_what_each_is(picker: ModelPicker, qtbot: QtBot) -> None:
    assert _names(picker) == ["starter", "Qwen3-30B", "Mixtral", "broken"]
    assert [(row.is_loaded, row.is_default) for row in _rows(picker)] == [(True, True), *[(False, False)] * 3]
    picker._speeds.found.emit("/lm/mixtral", 12.5, False)
    picker._speeds.found.emit("/models/q", 3.0, False)  # what was measured stays

    def said(row: int) -> str:
        return str(picker.rows.index(row, 0).data(Qt.ItemDataRole.AccessibleTextRole))

    qtbot.waitUntil(lambda: "12.5" in said(2))
    spoken = list(map(said, range(4)))
    assert all(word in spoken[1] for word in ("Qwen3-30B", "18.6 GB", "Q4_K", "24.6"))
    assert all(word in spoken[2] for word in ("Mixtral", "LM Studio", "12.5"))
    assert ENTRIES[3].problem in spoken[3]


def test_all_of_it_by_key(picker: ModelPicker, page: ChatView, qtbot: QtBot) -> None:
    wanted = QSignalSpy(picker.load_wanted)
    assert picker.filter.hasFocus()
    qtbot.keyClicks(picker.filter, "Q4")
    assert _names(picker) == ["Qwen3-30B"]
    picker.filter.clear()
    qtbot.keyClick(picker.filter, Qt.Key.Key_Down)
    qtbot.keyClick(picker.filter, Qt.Key.Key_Down)
    assert picker.current.entry.name == "Mixtral"
    qtbot.keyClick(picker.filter, Qt.Key.Key_Return)
    assert [wanted.at(n) for n in range(wanted.count())] == [["/lm/mixtral"]]
    assert picker.isHidden()
    qtbot.keyClick(page, Qt.Key.Key_M, Qt.KeyboardModifier.ControlModifier)
    assert picker.isVisible()
    qtbot.keyClick(picker.filter, Qt.Key.Key_Escape)
    assert picker.isHidden()
    assert page.title_bar.model_button.hasFocus()


def test_the_loaded_model_is_unloaded_and_another_made_the_default(
    picker: ModelPicker, page: ChatView, engine: ScriptedEngine, qtbot: QtBot
) -> None:
    freed = QSignalSpy(picker.unload_wanted)
    picker.load_button.click()
    assert freed.count() == 1
    engine.unload()
    assert not any(row.is_loaded for row in _rows(picker))
    assert page.empty.choose_button.isVisibleTo(page)
    _choose(picker, "Qwen3-30B")
    picker.default_button.click()
    assert page.presenter is not None
    assert [row.entry.name for row in _rows(picker) if row.is_default] == ["Qwen3-30B"]
    assert not picker.default_button.isEnabled()
    _choose(picker, "broken")
    assert not picker.load_button.isEnabled()
    picker.list.doubleClicked.emit(picker.list.currentIndex())
    assert picker.isVisible()


def test_a_default_model_from_a_file_can_be_gone_back_to(
    picker: ModelPicker, page: ChatView, engine: ScriptedEngine, tmp_path: Path, qtbot: QtBot
) -> None:
    engine.unload()
    file = tmp_path / "my-model.gguf"
    picker._settings.default_model = str(file)
    picker.hide()
    page.choose_model()
    assert _names(picker)[0] == "my-model"
    assert _rows(picker)[0].is_default
    _choose(picker, "my-model")
    with qtbot.waitSignal(picker.load_wanted) as asked:
        picker.load_button.click()
    assert asked.args == [str(file)]


def test_loading_shows_how_far_it_is_and_can_be_cancelled(
    picker: ModelPicker, page: ChatView, engine: ScriptedEngine
) -> None:
    cancelled = QSignalSpy(picker.cancel_wanted)
    assert not page.title_bar.cancel_button.isVisible()
    engine.model = None
    engine.start_loading(0.4)
    assert picker.loading_bar.value() == 40
    assert "Converting weights" in picker.loading_words.text()
    assert "2.40 GB of 6.00 GB" in picker.loading_words.text()
    picker.cancel_button.click()
    page.title_bar.cancel_button.click()
    assert cancelled.count() == 2
    engine.end_loading(replace(STARTER, path="/elsewhere/model.gguf"))
    assert not picker.cancel_button.isVisible()
    assert not page.title_bar.cancel_button.isVisible()
    first = _rows(picker)[0]  # opened from outside the library, and listed all the same
    assert (str(first.entry.path), first.is_loaded) == ("/elsewhere/model.gguf", True)
    _choose(picker, first.entry.name)
    picker.default_button.click()
    assert picker._settings.default_model == "/elsewhere/model.gguf"


def test_other_ways_to_a_model(picker: ModelPicker, page: ChatView) -> None:
    pages, files = QSignalSpy(page.page_wanted), QSignalSpy(picker.file_wanted)
    picker.more_button.click()
    picker.file_button.click()
    assert pages.at(0) == [MODELS]
    assert files.count() == 1
    assert picker.isHidden()


def test_a_file_of_a_checkpoint_stands_for_its_folder() -> None:
    assert model_of(Path("/m/a.GGUF")) == Path("/m/a.GGUF")
    assert model_of(Path("/m/model-00001-of-00002.safetensors")) == Path("/m")


def test_it_closes_for_a_new_chat(picker: ModelPicker, page: ChatView, qtbot: QtBot) -> None:
    assert picker.isVisible()
    qtbot.keyClick(page, Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier)
    qtbot.waitUntil(page.composer.box.hasFocus)
    assert not picker.isVisible(), "it would hide what is written"


@pytest.fixture
def speeds(qapp: QApplication, settings: Settings) -> Iterator[ModelSpeeds]:
    result = ModelSpeeds(settings)
    yield result
    result.close()
    result.deleteLater()


def test_speeds_are_predicted_once(
    speeds: ModelSpeeds, settings: Settings, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = made.look(made.gpu())
    plan = made.plan(look)
    asked: list[str] = []

    def answer(question: PlanQuestion) -> PlanAnswer:
        asked.append(question.config.model)
        return PlanAnswer(question, None if question.config.model == "bad" else plan)

    monkeypatch.setattr("app.services.planning.answer", answer)
    monkeypatch.setattr("engine.tuning.machine_state.look_at_machine", lambda *_: look)
    for _ in range(2):
        with qtbot.waitSignal(speeds.found) as found:
            speeds.ask(["good"])
        assert found.args == ["good", plan.speed.decode_tokens_per_s, False]
    assert asked == ["good"]
    settings.set("threads", 3)
    with qtbot.waitSignal(speeds.found):
        speeds.ask(["bad", "good"])
    assert asked == ["good", "bad", "good"]
