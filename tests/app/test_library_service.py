"""The models on this PC, listed and worked on in the background."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

import engine.checkpoint.importing as importing
import engine.checkpoint.library as engine_library
from app.services.library import Library, Work
from engine.checkpoint.library import LibraryEntry, Listing
from engine.checkpoint.model_directories import add_model_folder
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.paths import models_dir
from tests.tiny_checkpoint import write_tiny_checkpoint

ENTRY = LibraryEntry("tiny", Path("/models/tiny"))


@pytest.fixture
def library(switchyard_home: Path, qtbot: QtBot) -> Iterator[Library]:
    result = Library()
    yield result
    result.close()
    result.deleteLater()


def test_models_are_listed_with_what_is_wrong_with_them(library: Library, qtbot: QtBot) -> None:
    (models_dir() / "broken").mkdir(parents=True)
    with qtbot.waitSignal(library.listed):
        library.look()
    found = library.entry("broken")
    assert library.was_listed
    assert found is not None
    assert found.problem
    assert library.entry(str(models_dir() / "broken")) is found
    assert library.entry("nowhere") is None


def test_a_folder_that_cannot_be_read_is_a_sentence(
    library: Library, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = Listing((ENTRY,), ("The folder is gone.",))
    monkeypatch.setattr(engine_library, "look_around", lambda **_: listing)
    with qtbot.waitSignal(library.listed):
        library.look()
    assert (library.entries, library.problems) == ((ENTRY,), ("The folder is gone.",))

    def fails(**_: object) -> Listing:
        raise EngineError(ErrorCode.INVALID_REQUEST, "Nothing can be read.")

    monkeypatch.setattr(engine_library, "look_around", fails)
    with qtbot.waitSignal(library.listed):
        library.look()
    assert (library.entries, library.problems) == ((), ("Nothing can be read.",))


def test_work_reports_how_far_it_is_and_what_came_out(
    library: Library, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def verify(_model: str, said: Callable[[int, int], None], _cancelled: Callable[[], bool]) -> str:
        said(3, 10)
        go_on.wait(30)
        return "fine"

    monkeypatch.setattr(engine_library, "verify", verify)
    library.verify(ENTRY)
    qtbot.waitUntil(lambda: library.work == Work("verify", "tiny", 3, 10))
    with qtbot.waitSignal(library.listed), qtbot.waitSignal(library.ended) as waited:
        go_on.set()
    ended = waited.args[0]
    assert (ended.kind, ended.result, ended.problem) == ("verify", "fine", "")
    assert library.work is None


def test_cancelled_work_is_no_problem_and_the_next_begins(
    library: Library, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def takes_until_cancelled(
        path: Path, _name: None, _said: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> None:
        if path.name == "bad":
            raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, "It is broken.")
        while not cancelled():
            pass
        raise RequestCancelled

    ended: list[Work] = []
    library.ended.connect(ended.append)
    monkeypatch.setattr(importing, "import_model", takes_until_cancelled)
    library.bring_in(tmp_path / "endless")
    library.bring_in(tmp_path / "bad")
    library.cancel()
    qtbot.waitUntil(lambda: len(ended) == 2)
    assert [(work.name, work.was_cancelled, work.problem) for work in ended] == [
        ("endless", True, ""),
        ("bad", False, "It is broken."),
    ]


def test_a_listed_model_is_moved_and_removed_for_real(
    library: Library, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("send2trash.send2trash", lambda path: shutil.rmtree(path))
    importing.import_model(write_tiny_checkpoint(tmp_path / "source"), "tiny")
    with qtbot.waitSignal(library.listed):
        library.look()
    for folder in (tmp_path / "disk", models_dir()):
        with qtbot.waitSignal(library.ended) as moved, qtbot.waitSignal(library.listed):
            library.move(library.entries[0], folder)
        assert moved.args[0].problem == ""
        qtbot.waitUntil(lambda at=folder / "tiny": [entry.path for entry in library.entries] == [at])
    with qtbot.waitSignal(library.ended) as removed:
        library.remove(library.entries[0])
    assert (removed.args[0].problem, list(models_dir().iterdir())) == ("", [])


def test_a_chosen_model_that_is_gone_is_not_replaced_by_another_of_its_name(
    library: Library, qtbot: QtBot, tmp_path: Path
) -> None:
    chosen = importing.import_model(write_tiny_checkpoint(tmp_path / "source"), "tiny")
    other = write_tiny_checkpoint(tmp_path / "disk" / "tiny")
    add_model_folder(tmp_path / "disk")
    shutil.rmtree(chosen.path)
    with qtbot.waitSignal(library.ended) as removed:
        library.remove(chosen)
    assert removed.args[0].problem
    assert (other / "model.safetensors").exists()
