"""Downloads as the window follows them: through files, with a process that it starts and stops."""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

import app.services.downloads as service
from app.services.downloads import FOLDER_KEY, LIMIT_KEY, MOST_STARTS, Downloads
from app.services.settings import Settings
from engine.checkpoint.downloads import queue
from engine.checkpoint.downloads.queue import Download, DownloadState
from engine.checkpoint.hub import Candidate, RepoFile, Repository, http
from engine.checkpoint.model_directories import add_model_folder, drop_model_folder
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import models_dir
from tests.app.model_parts import download

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
    assert process is not None
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
