"""Updates in the window: off until wanted, never in the middle of work, and with a way back."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

import app.services.updates as module
from app.services.settings import Settings
from app.services.updates import LOOKED_KEY, Updates, UpdateStage
from app.views.settings.few_rows import UpdatesCard
from engine.checkpoint.downloads.queue import DownloadState
from engine.common import installed
from engine.common.errors import EngineError, ErrorCode
from engine.parts.updates import Update
from tests.app.layout_walker import without_name
from tests.app.model_parts import ENGINE_DOWNLOAD
from tests.app.scripted_parts import ScriptedDownloads, script
from tests.bundles import make_bundle, make_part

UPDATE = Update("0.3.0", "2026-12-01", "Faster.", "https://x.example/w.zip", "0" * 64, 92_000_000)
COMING = replace(ENGINE_DOWNLOAD, reference=f"switchyard:{UPDATE.name}")

Make = Callable[..., Updates]


@pytest.fixture
def downloads(qapp: object, settings: Settings) -> Iterator[ScriptedDownloads]:
    result = ScriptedDownloads(settings)
    yield result
    result.close()
    result.deleteLater()


@pytest.fixture
def work() -> list[str]:
    """What the engine does just now."""
    return []


@pytest.fixture
def make(
    settings: Settings, downloads: ScriptedDownloads, work: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(make_bundle(tmp_path / "program")))
    monkeypatch.setattr(module, "_look", lambda: (UPDATE, False))
    monkeypatch.setattr(module, "_BUSY_MS", 20)
    made: list[Updates] = []

    def build(text: str = "say(installed='0.3.0')") -> Updates:
        made.append(Updates(settings, downloads, lambda: bool(work), command=script(tmp_path, text)))
        return made[-1]

    yield build
    for one in made:
        one.close()
        one.deleteLater()


def offered(updates: Updates, qtbot: QtBot) -> UpdatesCard:
    card = UpdatesCard(updates)
    qtbot.addWidget(card)
    updates.look()
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.OFFERED)
    return card


def test_nothing_is_asked_before_people_want_it(make: Make, settings: Settings, qtbot: QtBot) -> None:
    updates = make()
    updates.begin()
    assert updates.stage is UpdateStage.IDLE
    card = UpdatesCard(updates)
    qtbot.addWidget(card)
    assert without_name(card) == []
    assert not card.controls["look_for_updates"].isChecked()
    card.controls["look_for_updates"].click()
    updates.begin()
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.OFFERED)
    again = make()
    again.begin()  # today it was done
    assert again.stage is UpdateStage.IDLE
    settings.set(LOOKED_KEY, 0)
    again.begin()
    qtbot.waitUntil(lambda: again.stage is UpdateStage.OFFERED)


def test_an_update_is_fetched_installed_and_used_at_the_next_start(
    make: Make, downloads: ScriptedDownloads, qtbot: QtBot
) -> None:
    updates = make()
    card = offered(updates, qtbot)
    assert "0.3.0" in card.words.text()
    assert "Faster." in card.words.text()
    assert downloads.asked == []
    card.get.click()
    assert downloads.asked == ["add"]
    downloads.show(COMING)
    assert "MB/s" in card.words.text()
    downloads.part_finished.emit(COMING)
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.READY)
    assert "Restart Switchyard" in card.words.text()


def test_it_waits_for_answers_and_jobs(make: Make, downloads: ScriptedDownloads, work: list[str], qtbot: QtBot) -> None:
    updates = make()
    card = offered(updates, qtbot)
    card.get.click()
    work.append("an answer")
    downloads.part_finished.emit(COMING)
    assert updates.stage is UpdateStage.WAITING
    assert "answers and jobs" in card.words.text()
    work.clear()
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.READY)


def test_an_engine_with_other_wheels_is_fetched_in_between(
    make: Make, downloads: ScriptedDownloads, qtbot: QtBot
) -> None:
    updates = make("say(needs='engine')")
    card = offered(updates, qtbot)
    card.get.click()
    downloads.part_finished.emit(COMING)
    qtbot.waitUntil(lambda: downloads.asked == ["add", "add"])
    assert updates.stage is UpdateStage.FETCHING


@pytest.mark.parametrize(
    ("text", "words"),
    [("say(error='It is full.', code='x')", "It is full."), ("raise SystemExit(1)", "Nothing has changed")],
)
def test_one_that_fails_is_told_and_tried_again(
    make: Make, downloads: ScriptedDownloads, qtbot: QtBot, text: str, words: str
) -> None:
    updates = make(text)
    card = offered(updates, qtbot)
    card.get.click()
    downloads.part_finished.emit(COMING)
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.FAILED)
    assert words in card.trouble.text()
    card.get.click()
    assert downloads.asked == ["add", "add"]
    downloads.show(replace(COMING, state=DownloadState.FAILED, problem="The mirror lies."))
    assert card.trouble.text() == "The mirror lies."


def test_a_server_that_lies_is_told(make: Make, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    def lie() -> None:
        raise EngineError(ErrorCode.DOWNLOAD_FAILED, "It is not signed: nothing has changed.")

    monkeypatch.setattr(module, "_look", lie)
    updates = make()
    card = UpdatesCard(updates)
    qtbot.addWidget(card)
    card.look.click()
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.FAILED)
    assert "not signed" in card.trouble.text()


def test_the_way_back(make: Make, qtbot: QtBot) -> None:
    updates = make()
    card = UpdatesCard(updates)
    qtbot.addWidget(card)
    assert not card.back.isEnabled()
    for name in ("engine-0.2.0-cpu", "engine-0.3.0-cpu", "window-0.3.0"):
        make_part(name)
    installed.use_parts(engine="engine-0.2.0-cpu")
    installed.use_parts(engine="engine-0.3.0-cpu", window="window-0.3.0")
    updates.changed.emit()
    assert "0.2.0" in card.back_words.text()
    card.back.click()
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.READY)
    assert installed.next_version() == "0.2.0"
