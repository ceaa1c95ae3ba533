"""A job leaves the engine's thread to chats whatever it is doing, and goes on where it was; no model is needed."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.batch_files.job_watcher import Between, JobWatcher, StoppedError, run_in_background
from engine.batch_files.journal import Journal
from engine.batch_files.rows import Answer, Row
from engine.common.config import BatchJob
from engine.common.errors import EngineError, ErrorCode
from tests.engine.shuffled_executor import ShuffledExecutor, Watch, results_in, run_job, write_rows


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("engine.jobs.job._RETRY_S", 0.01)
    monkeypatch.setattr("engine.jobs.job._REPORT_S", 0.0)
    return tmp_path


def _chat(asks: Callable[[], bool], answers: Callable[[], None], stops: Callable[[], bool]) -> JobWatcher:
    return JobWatcher(lambda _pace, _blocked: None, lambda _answer, _question: None, asks, answers, stops)


def test_background_work_pauses_for_requests_with_priority() -> None:
    begun, asked = threading.Event(), threading.Event()
    steps: list[int] = []
    seen: list[tuple[int, int]] = []

    def work(between: Between) -> str:
        begun.set()
        assert asked.wait(10)
        for step in range(200):
            steps.append(step)
            between(step / 200)
        return "done"

    def answer() -> None:
        asked.set()
        while not steps:  # it comes as far as its next step, and no further
            pass
        before = len(steps)
        threading.Event().wait(0.05)
        seen.append((before, len(steps)))

    watcher = _chat(lambda: begun.is_set() and not asked.is_set(), answer, lambda: False)
    assert run_in_background(work, watcher, lambda _share: None) == "done"
    assert seen == [(1, 1)]
    assert len(steps) == 200


def test_background_work_can_be_stopped_and_raises_its_errors() -> None:
    def endless(between: Between) -> None:
        while True:
            between(0.5)

    with pytest.raises(StoppedError):
        run_in_background(endless, _chat(lambda: False, lambda: None, lambda: True), lambda _share: None)

    def broken(_between: Between) -> None:
        raise EngineError(ErrorCode.DISK_FULL, "full")

    with pytest.raises(EngineError, match="full"):
        run_in_background(broken, _chat(lambda: False, lambda: None, lambda: False), lambda _share: None)
    assert not [thread for thread in threading.enumerate() if thread.name == "batch-files"]


class Full:
    """A disk without room for the first so many writes of a kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
        self.refusals = refusals
        real = Journal.record

        def record(journal: Journal, answers: list[Answer]) -> None:
            if answers:
                self.refuse()
            real(journal, answers)

        monkeypatch.setattr(Journal, "record", record)

    def refuse(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise EngineError(ErrorCode.DISK_FULL, "The disk is full.")


def test_a_full_disk_pauses_the_job_and_chats_are_answered_meanwhile(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.batch_files.journal._FLUSH_S", 0.0)
    write_rows(home / "in.jsonl", 30)
    full = Full(monkeypatch, 8)
    watch = Watch()
    chats: list[int] = []

    def blocked() -> bool:
        return bool(watch.paces) and watch.paces[-1][1].startswith("Waiting: The disk") and len(chats) < 3

    watcher = replace(watch.watcher(), should_yield=blocked, give_way=lambda: chats.append(full.refusals))
    watch.watcher = lambda: watcher  # type: ignore[method-assign]
    ending = run_job(BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl")), ShuffledExecutor(room=9), watch)
    assert ending.finished
    assert len(chats) == 3
    assert chats[0] > 0, "the first was answered while the disk was full"
    assert sorted(row["id"] for row in results_in(home / "out.jsonl")) == list(range(30))
    assert watch.paces[-1][1] == ""


def test_no_rows_are_asked_while_there_is_no_room_and_the_wait_can_be_cancelled(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.batch_files.journal._FLUSH_S", 0.0)
    write_rows(home / "in.jsonl", 40)
    full = Full(monkeypatch, 10**9)
    watch, executor = Watch(), ShuffledExecutor(room=4)
    waits = 0

    def cancelled() -> bool:
        return sum(blocked.startswith("Waiting") for _pace, blocked in watch.paces) > 3

    watcher = replace(watch.watcher(), cancelled=cancelled)
    watch.watcher = lambda: watcher  # type: ignore[method-assign]
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    ending = run_job(job, executor, watch)
    assert not ending.finished
    assert len(executor.asked) <= 5, "rows went on being asked though no answer could be kept"
    full.refusals = waits
    again = ShuffledExecutor()
    assert run_job(replace(job, start="resume"), again, Watch()).finished
    assert [row["id"] for row in results_in(home / "out.jsonl")] == list(range(40))


def test_a_result_that_does_not_fit_the_disk_is_written_when_there_is_room(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(home / "in.jsonl", 5)
    left = [3]

    def put_on_disk(_new: object) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.common.files.NewFile.finish", put_on_disk)
    monkeypatch.setattr("engine.jobs.job._RETRY_S", 0.05)
    watch = Watch()
    ending = run_job(BatchJob(str(home / "in.jsonl"), str(home / "out.csv")), ShuffledExecutor(), watch)
    assert (ending.finished, ending.written, left) == (True, 5, [0])
    told = [blocked for _pace, blocked in watch.paces if not blocked.endswith("%")]
    news = [text for before, text in itertools.pairwise(["", *told]) if text != before]
    assert [bool(text) for text in news] == [True, False], "a wait is said once, and that it is over"
    assert "disk" in news[0]
    assert [path.name for path in home.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("what", ["answers", "result"])
def test_a_disk_that_stays_full_ends_a_job_that_nobody_watches(
    home: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("engine.batch_files.journal._FLUSH_S", 0.0)
    monkeypatch.setattr("engine.jobs.job._RETRY_S", 0.01)
    write_rows(home / "in.jsonl", 20)
    watch = Watch()
    watcher = replace(watch.watcher(), patience_s=0.03)
    watch.watcher = lambda: watcher  # type: ignore[method-assign]
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.csv"))

    def full(_new: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if what == "answers":
            Full(patch, 10**9)
        else:
            patch.setattr("engine.common.files.NewFile.finish", full)
        with pytest.raises(EngineError) as refusal:
            run_job(job, ShuffledExecutor(), watch)
    assert refusal.value.code is ErrorCode.DISK_FULL
    assert str(home) in refusal.value.message
    assert [path.name for path in home.glob("*out*")] == []
    assert run_job(replace(job, start="resume"), ShuffledExecutor(), Watch()).written == 20


def test_rows_that_are_answered_already_are_left_when_a_chat_comes(home: Path) -> None:
    write_rows(home / "in.jsonl", 400)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), start="resume")
    assert run_job(job, ShuffledExecutor(), Watch()).finished
    watch = Watch(yields=25)
    executor = ShuffledExecutor()
    assert run_job(job, executor, watch).finished
    assert executor.asked == []
    assert watch.gave_way == 25


def test_counting_and_reading_say_how_far_they_are_and_can_be_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(home / "in.jsonl", 300)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    may_go_on = threading.Event()
    from engine.batch_files.rows import JsonLines

    real = JsonLines.rows

    def slow(self: JsonLines) -> Iterator[Row]:
        for row in real(self):
            if row.index == 199 and threading.current_thread().name == "batch-files":
                assert may_go_on.wait(10)
            yield row

    watch = Watch()
    watcher = replace(
        watch.watcher(),
        cancelled=lambda: bool(watch.paces) and watch.paces[-1][1].startswith("Counting") and not may_go_on.set(),
    )
    watch.watcher = lambda: watcher  # type: ignore[method-assign]
    monkeypatch.setattr(JsonLines, "rows", slow)
    executor = ShuffledExecutor()
    ending = run_job(job, executor, watch)
    assert (ending.finished, executor.asked) == (False, [])
    assert watch.paces[0][1].startswith("Counting the rows: ")
    assert json.loads((home / "in.jsonl").read_text().splitlines()[0])["id"] == 0
