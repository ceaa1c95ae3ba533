"""The models on this PC, listed and worked on in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

import engine.checkpoint.importing as importing
import engine.checkpoint.library as engine_library
from app.services.library import Library, Work
from engine.checkpoint.library import LibraryEntry, Listing
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.paths import models_dir

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
