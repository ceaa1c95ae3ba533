"""The engine's part in the window: what is offered, fetched, installed and told, and what happens when it is there."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtWidgets import QPushButton
from pytestqt.qtbot import QtBot

import app.services.engine_part as module
from app.services.engine_part import EnginePart, PartStage
from app.services.settings import Settings
from app.views.first_run import EngineCard
from engine.checkpoint.downloads.queue import Download, DownloadState
from engine.common import installed
from tests.app.layout_walker import without_name
from tests.app.model_parts import ENGINE, ENGINE_DOWNLOAD
from tests.app.scripted_parts import ScriptedDownloads, script
from tests.bundles import make_bundle, make_part

NAME = ENGINE.name


def coming(state: DownloadState = DownloadState.RUNNING, **other: object) -> Download:
    return replace(ENGINE_DOWNLOAD, state=state, **other)  # type: ignore[arg-type]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    root = make_bundle(tmp_path / "program")
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(root))
    monkeypatch.setattr(module, "_look", lambda: (ENGINE, False))
    return root


@pytest.fixture
def downloads(qapp: object, settings: Settings) -> Iterator[ScriptedDownloads]:
    result = ScriptedDownloads(settings)
    yield result
    result.close()
    result.deleteLater()


@pytest.fixture
def make(
    qtbot: QtBot, root: Path, downloads: ScriptedDownloads, tmp_path: Path
) -> Iterator[Callable[[str], EnginePart]]:
    made: list[EnginePart] = []

    def build(text: str = "") -> EnginePart:
        made.append(EnginePart(downloads, command=script(tmp_path, text)))
        return made[-1]

    yield build
    for part in made:
        part.close()
        part.deleteLater()


def offered(part: EnginePart, qtbot: QtBot) -> EngineCard:
    card = EngineCard(part)
    qtbot.addWidget(card)
    card.resize(640, 400)
    card.show()
    part.look()
    qtbot.waitUntil(lambda: part.stage is PartStage.OFFERED)
    return card


def shown(card: EngineCard) -> set[str]:
    return {button.text() for button in card.findChildren(QPushButton) if not button.isHidden()}


def test_where_the_engine_is_there_nothing_is_offered(
    qtbot: QtBot, downloads: ScriptedDownloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(installed.BUNDLE_VARIABLE, raising=False)
    part = EnginePart(downloads)
    card = EngineCard(part)
    qtbot.addWidget(card)
    assert not part.is_needed
    assert card.isHidden()


def test_what_was_found_and_what_is_fetched_is_said_before_a_click(
    make: Callable[[str], EnginePart], downloads: ScriptedDownloads, qtbot: QtBot
) -> None:
    part = make("")
    card = offered(part, qtbot)
    assert "RTX 4060" in card.why.text()
    assert "CUDA 13.0" in card.text.text()
    assert "2.85 GB" in card.text.text()
    assert shown(card) == {"Get the engine and the starter", "Engine only", "Use a file…", "Mirror and proxy…"}
    assert downloads.asked == []
    assert without_name(card) == []
    card.get.click()
    assert downloads.asked == ["add"]
    assert part.wants_starter


def test_a_download_is_paused_resumed_and_given_up(
    make: Callable[[str], EnginePart], downloads: ScriptedDownloads, qtbot: QtBot
) -> None:
    part = make("")
    card = offered(part, qtbot)
    card.alone.setFocus()
    card.alone.click()
    downloads.show(coming())
    assert part.stage is PartStage.FETCHING
    assert downloads.entries == ()  # no model
    assert shown(card) == {"Pause", "Cancel", "Mirror and proxy…"}
    card.pause.click()
    downloads.show(coming(DownloadState.PAUSED))
    assert shown(card) == {"Resume", "Cancel", "Mirror and proxy…"}
    card.resume.click()
    downloads.show(coming())
    card.cancel.click()
    downloads.show()
    assert downloads.asked == ["add", "pause engine-key", "resume engine-key", "cancel engine-key"]
    assert part.stage is PartStage.OFFERED
    assert not part.wants_starter


def test_a_failed_download_is_told_and_tried_again(
    make: Callable[[str], EnginePart], downloads: ScriptedDownloads, qtbot: QtBot
) -> None:
    part = make("")
    card = offered(part, qtbot)
    card.alone.click()
    downloads.show(coming(DownloadState.FAILED, problem="The mirror lies."))
    assert card.problem.text() == "The mirror lies."
    assert shown(card) == {"Try again", "Use a file…", "Mirror and proxy…"}
    card.again.click()
    assert downloads.asked == ["add", "resume engine-key"]


def test_no_room_is_told_when_it_is_asked_for(
    make: Callable[[str], EnginePart], downloads: ScriptedDownloads, qtbot: QtBot
) -> None:
    part = make("")
    card = offered(part, qtbot)
    card.alone.click()
    downloads.problem.emit("8 GB needed.")
    assert (part.stage, card.problem.text()) == (PartStage.FAILED, "8 GB needed.")
    card.again.click()  # looks again, and then goes on by itself
    qtbot.waitUntil(lambda: downloads.asked == ["add", "add"])


def test_what_an_older_version_began_is_given_up(
    make: Callable[[str], EnginePart], downloads: ScriptedDownloads, qtbot: QtBot
) -> None:
    part = make("")
    offered(part, qtbot)
    downloads.show(coming(reference="switchyard:engine-0.1.0-cu130"))
    assert downloads.asked == ["cancel engine-key"]
    assert part.stage is PartStage.OFFERED


def test_what_has_arrived_is_installed_and_ready(
    make: Callable[[str], EnginePart], downloads: ScriptedDownloads, qtbot: QtBot
) -> None:
    part = make("say(step='unpacking'); sys.stdin.read(); say(installed='x')")
    card = offered(part, qtbot)
    card.alone.click()
    downloads.show(coming())
    steps: list[str] = []
    part.changed.connect(lambda: steps.append(part.step))
    downloads.part_finished.emit(coming(DownloadState.DONE))
    downloads.show()
    qtbot.waitUntil(lambda: card.state.text() == "Unpacking…")
    assert shown(card) == set()
    make_part(NAME)
    process = part._installation._process
    with qtbot.waitSignal(part.ready):
        process.closeWriteChannel()
    assert not part.is_needed
    assert card.isHidden()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("say(error='The disk is full.', code='disk_full')", "disk is full"),
        ("raise SystemExit(9)", "Nothing is lost"),
        ("print('{'); print('[]')", "Nothing is lost"),
        ("say(installed='x')", "Nothing is lost"),  # but it is not there
    ],
)
def test_an_installation_that_fails_is_told(
    make: Callable[[str], EnginePart], qtbot: QtBot, tmp_path: Path, text: str, words: str
) -> None:
    part = make(text)
    card = offered(part, qtbot)
    part.use_files(tmp_path / "offline" / "torch.whl")
    qtbot.waitUntil(lambda: part.stage is PartStage.FAILED)
    assert words in card.problem.text()
    assert "Try again" in shown(card)


def test_what_was_fetched_before_is_installed_at_once(
    make: Callable[[str], EnginePart], qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_look", lambda: (ENGINE, True))
    part = make("sys.stdin.read()")
    part.look()
    qtbot.waitUntil(lambda: part.stage is PartStage.INSTALLING)


def test_a_damaged_package_is_told(
    make: Callable[[str], EnginePart], qtbot: QtBot, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv(installed.BUNDLE_VARIABLE, str(root))
    (root / "bundle.json").unlink()
    installed._read_bundle.cache_clear()
    part = make("")
    card = EngineCard(part)
    qtbot.addWidget(card)
    part.look()
    qtbot.waitUntil(lambda: part.stage is PartStage.FAILED)
    assert "install Switchyard again" in card.problem.text()
