"""Questions to the hub: the latest is answered, failures are sentences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

import app.services.hub as hub_service
import engine.checkpoint.hub as engine_hub
from app.services.hub import Hub, RepositoryAnswer, SearchAnswer
from engine.checkpoint.hub import Candidate, contents
from engine.checkpoint.hub.http import HubError, HubReason
from engine.checkpoint.model_directories import Room
from engine.checkpoint.model_shape import ModelShape, read_model
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.planner.plan_parts import Limits
from engine.tuning.fit import FitCard
from engine.tuning.machine_state import MachineLook
from tests.app import model_parts as parts
from tests.app import tuning_results as made


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


@pytest.mark.parametrize(
    ("error", "network", "token"),
    [
        (HubError(HubReason.OFFLINE, "It cannot be."), True, False),
        (HubError(HubReason.NEEDS_LICENCE, "It cannot be.", "https://hub/org/x"), False, True),
        (EngineError(ErrorCode.MODEL_UNSUPPORTED, "It cannot be."), False, False),
    ],
)
def test_trouble_says_whether_it_is_the_network(
    hub: Hub, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch, error: EngineError, network: bool, token: bool
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(hub_service, "search_hub", fails)
    monkeypatch.setattr(hub_service, "read_candidates", fails)
    with qtbot.waitSignal(hub.found) as found:
        hub.search("x")
    with qtbot.waitSignal(hub.opened) as opened:
        hub.open("org/x")
    for answer in (found.args[0], opened.args[0]):
        trouble = answer.trouble
        assert (trouble.sentence, trouble.is_network, trouble.needs_token) == ("It cannot be.", network, token)


def test_what_is_judged_and_recommended_goes_by_the_disk_of_the_downloads(
    hub: Hub, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    judged: list[int | None] = []

    def recommended(_device: str, free: int | None) -> tuple[MachineLook, tuple[()]]:
        asked.append(free)
        return replace(made.look(made.gpu()), download_free=free), ()

    def judge(_shaped: object, look: MachineLook, _limits: Limits) -> FitCard:
        judged.append(look.download_free)
        return FitCard((), None, "")

    monkeypatch.setattr(hub_service, "catalogue_here", recommended)
    monkeypatch.setattr(hub_service, "judge_candidates", judge)
    with qtbot.waitSignal(hub.looked):
        hub.look_at_machine()
    usb = Room(Path("/media/usb"), 900 * parts.GB, is_elsewhere=True)
    with qtbot.waitSignal(hub.looked):
        hub.download_to(usb)
    hub.download_to(replace(usb, free=900 * parts.GB - 1))  # hardly another: no second look
    with qtbot.waitSignal(hub.judged):
        hub.judge((), Limits())
    with qtbot.waitSignal(hub.looked):
        hub.download_to(Room(Path("/models"), 50 * parts.GB))
    assert asked == [None, 900 * parts.GB, None]
    assert judged == [900 * parts.GB - 1]


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


def test_one_damaged_file_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = parts.CANDIDATES[3], parts.CANDIDATES[4]

    def shape(candidate: Candidate, **_: object) -> ModelShape:
        if candidate is bad:
            raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, "Its header is broken.")
        return read_model("qwen3-30b-a3b")

    monkeypatch.setattr(engine_hub, "read_repository", lambda *_, **__: parts.REPOSITORY)
    monkeypatch.setattr(contents, "candidates", lambda *_, **__: (good, bad))
    monkeypatch.setattr(contents, "candidate_shape", shape)
    said: list[RepositoryAnswer] = []
    answer = hub_service.read_candidates(parts.REPOSITORY.id, lambda: False, said.append)
    assert [(one.label, one.problem, found is None) for one, found in answer.shaped] == [
        (good.label, "", False),
        (bad.label, "Its header is broken.", True),
    ]
    assert [len(one.shaped) for one in said] == [1]
