"""Jobs in the engine process run beside each other, stop for another model, and end once."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.rows import Answer, failed
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.errors import ErrorCode
from engine.planner.batch_prediction import Bottleneck, JobPrediction, JobRows
from engine.process.batch import BatchService
from engine.process.requests import RequestQueue, cancelled_event
from engine.protocol import (
    BatchFinished,
    BatchPlanned,
    BatchProgress,
    BatchRows,
    ChatMessage,
    Event,
    Failed,
    Finished,
    Generate,
    LoadModel,
    Request,
    SampleBatch,
    StartBatch,
    decode,
    encode,
)
from engine.remote.job import OwnModel

_PACE = Pace(done=2, failed=1, total=None, tokens_per_s=3.0, remaining_low_s=None, remaining_high_s=None)

_PREDICTION = JobPrediction(JobRows(30, 20.0, 10.0), 24, 3, "", 300.0, 150.0, 450.0, 1.0, 2.0, Bottleneck.LINK)


class Engine:
    """Asks the watcher as a real job does; `steps` says how often before it is done."""

    def __init__(self, between: Callable[[int], None] = lambda _step: None, steps: int = 6) -> None:
        self._between, self._steps = between, steps
        self.seen: list[str] = []

    def job_runner(self) -> Callable[[PreparedJob, JobWatcher], JobEnding]:
        return self._run

    def hosted_model(self, *, beside_others: bool) -> OwnModel:
        raise AssertionError("no job here names this machine among endpoints")

    def _run(self, prepared: PreparedJob, watcher: JobWatcher) -> JobEnding:
        watcher.on_plan(_PREDICTION)
        for step in range(self._steps):
            self._between(step)
            if watcher.cancelled():
                return JobEnding(False, _PACE, 1)
            assert not watcher.should_yield()  # who calls it answers chats
            self.seen.append("works")
            watcher.on_answer(Answer(step, "a" * 1000, "stop", 1, 2, reasoning="A" * 1000), "question")
            watcher.on_pace(_PACE, "")
        return JobEnding(True, _PACE, 6, tokens=12, note="one by one")

    def sample_batch(self, prepared: PreparedJob, rows: int, watcher: JobWatcher) -> None:
        if watcher.should_yield():
            watcher.take_turns()
        watcher.on_answer(Answer(0, "yes", "stop", 1, 2), "question")
        watcher.on_answer(failed(1, "is empty"), "")
        watcher.on_plan(_PREDICTION.corrected(2.0, 0.5))


class Process:
    """The worker without a model: its queue, what it sends, and chats that are answered in two turns."""

    def __init__(self, engine: Engine) -> None:
        self.sent: list[Event] = []
        self.requests = RequestQueue(self.sent.append)
        self._engine = engine
        self._chats: list[tuple[str, int]] = []
        self.batches = BatchService(self.requests, self.sent.append, self)

    def are_due(self) -> bool:
        while (chat := self.requests.take_if(Generate)) is not None:
            self._chats.append((chat.request_id, 2))
        return bool(self._chats)

    def take_turns(self) -> None:
        chats, self._chats = self._chats, []
        for name, turns in chats:
            self._engine.seen.append(name)
            if turns > 1:
                self._chats.append((name, turns - 1))
            else:
                self.requests.end(Finished(name, "stop", 1, 0, 1, 0.1, 1.0))

    def answer(self, _until: Callable[[], bool]) -> None:
        while self._chats:
            self.take_turns()

    def begin(self) -> None:
        request = self.requests.take()
        assert isinstance(request, StartBatch)
        self.batches.start(self._engine, request)

    def wait(self) -> None:
        self.batches.threads.join()
        assert not self.batches.are_running


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BatchJob:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    return BatchJob(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))


def _chat(name: str) -> Generate:
    return Generate(name, (ChatMessage("user", "hi"),), SamplingParams())


def _of(kind: type, sent: list[Event]) -> list[Any]:
    return [event for event in sent if isinstance(event, kind)]


def test_jobs_run_beside_each_other(job: BatchJob) -> None:
    both = threading.Barrier(2, timeout=10)
    engine = Engine(lambda step: both.wait() and None if step == 1 else None)
    process = Process(engine)
    for name in ("one", "other"):
        process.requests.accept(StartBatch(name, job))
        process.begin()
    process.wait()
    assert engine.seen == ["works"] * 12
    endings = {ending.request_id: ending for ending in _of(BatchFinished, process.sent)}
    assert set(endings) == {"one", "other"}
    ending = endings["one"]
    assert (ending.finished, ending.done, ending.tokens, ending.note) == (True, 2, 12, "one by one")
    for name in endings:
        events = [event for event in _of(BatchRows, process.sent) if event.request_id == name]
        shown = [row for event in events for row in event.rows]
        assert [row.row for row in shown] == list(range(6))
        assert all(len(row.answer) < 1000 for row in shown)
        assert [row.reasoning for row in shown] == [row.answer.upper() for row in shown]
    assert _of(BatchProgress, process.sent)[0].pace.total is None
    planned = BatchPlanned("one", _PREDICTION)
    assert planned in _of(BatchPlanned, process.sent)
    assert decode(encode(planned)) == planned


@pytest.mark.parametrize("stop", ["cancel", "another model", "another model is about to be loaded"])
def test_a_job_stops_when_it_is_cancelled_or_another_model_is_wanted(job: BatchJob, stop: str) -> None:
    is_there, goes_on = threading.Event(), threading.Event()

    def between(step: int) -> None:
        if step == 1:
            is_there.set()
            assert goes_on.wait(10)

    engine = Engine(between)
    process = Process(engine)
    process.requests.accept(StartBatch("job", job))
    process.begin()
    assert is_there.wait(10)
    if stop == "cancel":
        process.requests.cancel("job")
    elif stop == "another model":
        process.requests.accept(LoadModel("load", EngineConfig("other")))
    else:
        process.batches.settle(goes_on.set)
    goes_on.set()
    process.wait()
    assert engine.seen == ["works"]
    (ending,) = _of(BatchFinished, process.sent)
    assert not ending.finished


def test_a_sample_shows_each_row_as_it_comes(job: BatchJob) -> None:
    process = Process(Engine())
    ending = process.batches.sample(Engine(), SampleBatch("sample", job, 3))
    assert (ending.finished, ending.done, ending.failed, ending.tokens) == (True, 2, 1, 2)
    assert [len(event.rows) for event in _of(BatchRows, process.sent)] == [1, 1]
    plan = _of(BatchPlanned, process.sent)[0].prediction
    assert (plan.low, plan.high, plan.is_measured) == (150.0, 900.0, True)


def test_a_job_that_cannot_be_begun_is_refused(job: BatchJob) -> None:
    Path(job.input).unlink()
    process = Process(Engine())
    process.requests.accept(StartBatch("job", job))
    process.begin()
    process.wait()
    (failure,) = _of(Failed, process.sent)
    assert failure.code is ErrorCode.INVALID_REQUEST


def test_a_chat_has_its_turn_beside_a_sample(job: BatchJob) -> None:
    process = Process(engine := Engine())
    process.requests.accept(_chat("chat"))
    process.batches.sample(engine, SampleBatch("sample", job, 3))
    assert engine.seen == ["chat"]


def test_waiting_jobs_that_are_cancelled_end_at_once(job: BatchJob) -> None:
    process = Process(Engine())
    requests: list[Request] = [StartBatch("a", job), SampleBatch("b", job, 3)]
    for request in requests:
        process.requests.accept(request)
        process.requests.cancel(request.request_id)
        assert cancelled_event(request) in process.sent
    assert not process.requests.waits()
