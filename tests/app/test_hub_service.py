"""Questions to the hub: the latest is answered, failures are sentences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from pytestqt.qtbot import QtBot

import app.services.hub as hub_service
from app.services.hub import Hub, RepositoryAnswer, SearchAnswer
from engine.common.errors import CancelCheck, EngineError, ErrorCode


@pytest.fixture
def hub(qtbot: QtBot) -> Iterator[Hub]:
    result = Hub()
    yield result
    result.close()
    result.deleteLater()


def test_only_the_last_search_is_answered(hub: Hub, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[SearchAnswer] = []
    hub.found.connect(answers.append)
    began = threading.Event()

    def search(text: str, cancelled: CancelCheck) -> tuple[()]:
        began.set()
        while text == "first" and not cancelled():
            pass
        return ()

    monkeypatch.setattr(hub_service, "search_hub", search)
    hub.search("first")
    began.wait(30)
    hub.search("second")
    qtbot.waitUntil(lambda: answers == [SearchAnswer("second")])


@pytest.mark.parametrize(("code", "network"), [(ErrorCode.DOWNLOAD_FAILED, True), (ErrorCode.MODEL_NOT_FOUND, False)])
def test_trouble_says_whether_it_is_the_network(
    hub: Hub, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, code: ErrorCode, network: bool
) -> None:
    def fails(*_: object) -> None:
        raise EngineError(code, "It cannot be.")

    monkeypatch.setattr(hub_service, "search_hub", fails)
    monkeypatch.setattr(hub_service, "read_candidates", fails)
    with qtbot.waitSignal(hub.found) as found:
        hub.search("x")
    with qtbot.waitSignal(hub.opened) as opened:
        hub.open("org/x")
    for answer in (found.args[0], opened.args[0]):
        assert (answer.trouble.sentence, answer.trouble.is_network) == ("It cannot be.", network)


def test_candidates_arrive_one_by_one_and_only_of_the_last_repository(
    hub: Hub, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[RepositoryAnswer] = []
    hub.opened.connect(answers.append)
    said = threading.Event()

    def read(reference: str, cancelled: CancelCheck, say: Callable[[RepositoryAnswer], object]) -> RepositoryAnswer:
        say(RepositoryAnswer(reference, (), 2))
        said.set()
        while reference == "org/old" and not cancelled():
            pass
        return RepositoryAnswer(reference)

    monkeypatch.setattr(hub_service, "read_candidates", read)
    hub.open("org/old")
    said.wait(30)
    hub.open("org/new")
    qtbot.waitUntil(lambda: len(answers) == 2)
    assert [(answer.reference, answer.is_whole) for answer in answers] == [("org/new", False), ("org/new", True)]
