"""The hub, the library and downloads as the window follows them."""

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

import app.services.downloads as service
import app.services.hub as hub_service
import engine.checkpoint.hub as engine_hub
import engine.checkpoint.importing as importing
import engine.checkpoint.library as engine_library
from app.services.downloads import FOLDER_KEY, LIMIT_KEY, MOST_STARTS, Downloads
from app.services.hub import Hub, RepositoryAnswer, SearchAnswer
from app.services.library import Library, Work
from app.services.settings import Settings
from engine.checkpoint.downloads import queue
from engine.checkpoint.downloads.queue import Download, DownloadState
from engine.checkpoint.hub import Candidate, RepoFile, Repository, contents, http
from engine.checkpoint.hub.http import HubError, HubReason
from engine.checkpoint.library import LibraryEntry, Listing
from engine.checkpoint.model_directories import Room, add_model_folder, drop_model_folder
from engine.checkpoint.model_shape import ModelShape, read_model
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.common.paths import models_dir
from engine.planner.plan_parts import Limits
from engine.tuning.fit import FitCard
from engine.tuning.machine_state import MachineLook
from tests.app import model_parts as parts
from tests.app import tuning_results as made
from tests.app.model_parts import download
from tests.tiny_checkpoint import write_tiny_checkpoint


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


REPOSITORY = Repository("huggingface", "org/Tiny", "0" * 40, (), "mit", "", False)
CANDIDATE = Candidate(REPOSITORY, "Q4_K_M", (RepoFile("tiny.gguf", 1000),), "good")
SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]

Make = Callable[[list[str]], Downloads]


@pytest.fixture
def make(settings: Settings, qtbot: QtBot) -> Iterator[Make]:
    made: list[Downloads] = []

    def make(command: list[str]) -> Downloads:
        made.append(Downloads(settings, command=command))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.deleteLater()


def test_a_limit_that_was_set_elsewhere_stays_until_another_is_chosen(
    make: Make, settings: Settings, qtbot: QtBot
) -> None:
    key = queue.add(CANDIDATE).key
    queue.set_limit(key, 2000)
    settings.set(LIMIT_KEY, 1000)
    downloads = make(SLEEPS)
    downloads.add(replace(CANDIDATE, label="Q8_0"))
    qtbot.waitUntil(lambda: sorted(one.limit_bytes_per_s for one in downloads.entries) == [1000, 2000])
    downloads.set_limit(0)
    qtbot.waitUntil(lambda: [one.limit_bytes_per_s for one in downloads.entries] == [0, 0])


def test_whether_there_is_a_token_is_asked_in_the_background(
    make: Make, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[threading.Thread] = []
    answers: list[bool] = []
    monkeypatch.setattr(http, "read_token", lambda _host: asked.append(threading.current_thread()) or "hf_x")
    make(SLEEPS).ask_token("hub.example", answers.append)
    qtbot.waitUntil(lambda: answers == [True])
    assert asked != [threading.main_thread()]


def test_a_download_is_added_paused_resumed_ordered_and_cancelled(make: Make, qtbot: QtBot) -> None:
    downloads = make(SLEEPS)
    added: list[Download] = []
    downloads.set_limit(1000)
    downloads.add(CANDIDATE, added.append)
    downloads.add(replace(CANDIDATE, label="Q8_0"), added.append)
    qtbot.waitUntil(lambda: len(downloads.entries) == len(added) == 2)
    first, second = downloads.entries
    assert (first.state, first.limit_bytes_per_s, first.total_bytes) == (DownloadState.WAITING, 1000, 1000)
    assert [one.key for one in added] == [first.key, second.key]
    qtbot.waitUntil(lambda: downloads.is_running)
    downloads.move(second.key, 0)
    qtbot.waitUntil(lambda: [one.key for one in downloads.entries] == [second.key, first.key])
    downloads.pause(first.key)
    qtbot.waitUntil(lambda: downloads.entries[1].state is DownloadState.PAUSED)
    downloads.resume(first.key)
    qtbot.waitUntil(lambda: downloads.entries[1].state is DownloadState.WAITING)
    downloads.cancel(first.key)
    qtbot.waitUntil(lambda: [one.key for one in downloads.entries] == [second.key])


def test_a_download_goes_into_the_folder_that_was_chosen(
    make: Make, settings: Settings, qtbot: QtBot, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    add_model_folder(disk)
    downloads, added = make(SLEEPS), list[Download]()
    settings.set(FOLDER_KEY, str(disk))
    downloads.add(CANDIDATE, added.append)
    qtbot.waitUntil(lambda: len(added) == 1)
    assert added[0].folder.parent == disk
    drop_model_folder(disk)  # then its choice counts no more
    downloads.add(replace(CANDIDATE, label="Q8_0"), added.append)
    qtbot.waitUntil(lambda: len(added) == 2)
    assert added[1].folder.parent == models_dir()


def test_closing_stops_the_process_and_the_next_window_goes_on(make: Make, qtbot: QtBot) -> None:
    downloads = make(SLEEPS)
    downloads.begin()
    downloads.add(CANDIDATE)
    qtbot.waitUntil(lambda: downloads.is_running)
    process = downloads._process
    downloads.close()
    assert process.processId() == 0
    following = make(SLEEPS)
    following.begin()
    qtbot.waitUntil(lambda: following.is_running)


def test_a_process_that_keeps_dying_is_not_started_for_ever(
    make: Make, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "START_AGAIN_MS", 1)
    monkeypatch.setattr(service, "LOOK_MS", 20)
    downloads = make([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    with qtbot.waitSignal(downloads.problem, timeout=60_000):
        downloads.add(CANDIDATE)
    assert downloads._starts == MOST_STARTS
    with qtbot.waitSignal(downloads.changed):
        downloads.pause(downloads.entries[0].key)
    assert not downloads.is_running


def test_a_program_that_is_missing_is_a_sentence(make: Make, qtbot: QtBot) -> None:
    downloads = make(["/nowhere/switchyard"])
    with qtbot.waitSignal(downloads.problem):
        downloads.add(CANDIDATE)


def test_what_cannot_be_added_is_a_sentence(make: Make, qtbot: QtBot) -> None:
    downloads = make(SLEEPS)
    with qtbot.waitSignal(downloads.problem) as problem:
        downloads.add(replace(CANDIDATE, problem="Nothing here can run."))
    assert problem.args == ["Nothing here can run."]
    assert downloads.entries == ()


def test_what_is_done_is_announced_once_and_forgotten(
    make: Make, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = download("one", state=DownloadState.RUNNING, is_live=True)
    there = [running]
    forgotten: list[str] = []
    finished: list[Download] = []
    monkeypatch.setattr(queue, "downloads", lambda: list(there))
    monkeypatch.setattr(queue, "cancel", forgotten.append)
    downloads = make(SLEEPS)
    downloads.finished.connect(finished.append)
    downloads.begin()
    qtbot.waitUntil(lambda: downloads.entries == (running,))
    assert not downloads.is_running  # another process runs it
    there[0] = replace(running, state=DownloadState.DONE, is_live=False)
    downloads.watch(on=True)
    qtbot.waitUntil(lambda: forgotten == ["one"])
    downloads.watch(on=True)
    qtbot.wait(50)
    assert (downloads.entries, forgotten) == ((), ["one"])
    assert [one.key for one in finished] == ["one"]


def test_a_folder_that_cannot_be_read_for_a_while_changes_nothing(
    make: Make, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = download("one", state=DownloadState.RUNNING, is_live=True)
    monkeypatch.setattr(queue, "downloads", lambda: [running])
    downloads = make(SLEEPS)
    downloads.begin()
    qtbot.waitUntil(lambda: downloads.entries == (running,))

    def fails() -> list[Download]:
        raise EngineError(ErrorCode.INVALID_REQUEST, "The folder is away.")

    monkeypatch.setattr(queue, "downloads", fails)
    downloads.watch(on=True)
    qtbot.waitUntil(lambda: not downloads._looking.is_busy)
    assert downloads.entries == (running,)
