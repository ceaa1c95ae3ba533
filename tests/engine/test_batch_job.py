"""A job answers every row once, whatever the order, the interruptions and the faults; no model is needed for that."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch_files.answer import Answer
from engine.batch_files.job_list import known_jobs
from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.journal import journal_path
from engine.batch_files.opening import open_source
from engine.batch_files.pace import Pace
from engine.batch_files.prepared_job import prepare
from engine.config import BatchJob, SamplingParams
from engine.errors import EngineError, ErrorCode
from engine.runtime.batch.job import JobRun
from engine.runtime.batch.request import AnswerCallback, BatchAnswer, BatchRequest, Check, Outcome


class ShuffledExecutor:
    """Says the question in capitals; holds some rows at a time, ends them in any order, yields when asked.

    Args:
        cut: rows whose answers are cut by their limit of tokens, so many times.
    """

    def __init__(self, seed: int = 0, room: int = 5, cut: dict[int, int] | None = None) -> None:
        self._chance = random.Random(seed)
        self._room = room
        self._cut = dict(cut or {})
        self._held: list[BatchRequest] = []
        self.asked: list[tuple[int, int | None]] = []

    @property
    def under_way(self) -> tuple[int, int]:
        return len(self._held), 0

    def run(
        self, rows: Iterator[BatchRequest], on_row: AnswerCallback, should_yield: Check, cancelled: Check
    ) -> Outcome:
        while True:
            while len(self._held) < self._room and (request := next(rows, None)) is not None:
                self._held.append(request)
                self.asked.append((request.row, request.sampling.seed))
            if not self._held:
                return Outcome.FINISHED
            if cancelled():
                for request in self._held:
                    on_row(BatchAnswer(request.row, "", "cancelled"))
                return Outcome.CANCELLED
            if should_yield():
                return Outcome.YIELDED
            request = self._held.pop(self._chance.randrange(len(self._held)))
            on_row(self._answer(request))

    def _answer(self, request: BatchRequest) -> BatchAnswer:
        question = request.messages[-1].content
        if "too long" in question:
            return BatchAnswer(
                request.row, "", "failed", error=EngineError(ErrorCode.PROMPT_TOO_LONG, "The prompt is too long.")
            )
        if request.constraint is not None and not self._cut.get(request.row):
            return BatchAnswer(request.row, _satisfy(request), "stop", 3, 2)
        self._cut[request.row] = self._cut.get(request.row, 1) - 1
        return BatchAnswer(request.row, question.upper(), "length", 3, 2)


class Choosing:
    """Stands for the constraint of one answer."""

    complete = False


def _satisfy(request: BatchRequest) -> str:
    assert isinstance(request.constraint, Choosing)
    request.constraint.complete = True
    return "yes"


class Choices:
    """Stands for what makes constraints."""

    def begin(self, _constraint: object) -> Choosing:
        return Choosing()


class Watch:
    """A window that looks on; `interrupt` says how often somebody else comes first."""

    def __init__(self, yields: int = 0, cancel_after: int | None = None) -> None:
        self.paces: list[tuple[Pace, str]] = []
        self.answers: list[tuple[Answer, str]] = []
        self._yields = yields
        self._cancel_after = cancel_after
        self.gave_way = 0

    def watcher(self) -> JobWatcher:
        return JobWatcher(
            on_pace=lambda pace, blocked: self.paces.append((pace, blocked)),
            on_answer=lambda answer, question: self.answers.append((answer, question)),
            should_yield=lambda: self.gave_way < self._yields,
            give_way=self._give_way,
            cancelled=lambda: self._cancel_after is not None and len(self.answers) >= self._cancel_after,
        )

    def _give_way(self) -> None:
        self.gave_way += 1


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    return tmp_path


def _write_rows(path: Path, count: int) -> None:
    special = {3: "", 5: "too long"}
    path.write_text("".join(json.dumps({"text": special.get(i, f"row {i}"), "id": i}) + "\n" for i in range(count)))


def _run(job: BatchJob, executor: ShuffledExecutor, watch: Watch) -> JobEnding:
    prepared = prepare(job)
    manifest = prepared.manifest("model", "bf16", lambda: False)
    journal = prepared.open_journal(manifest, "tiny")
    try:
        choices: Any = Choices()
        return JobRun(prepared, manifest, journal, executor, lambda: choices, watch.watcher()).run()
    finally:
        journal.close()


def _results(path: Path) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in open_source(path).rows()]


def test_every_row_has_its_answer_in_the_inputs_order(home: Path) -> None:
    _write_rows(home / "in.jsonl", 30)
    watch = Watch(yields=4)
    ending = _run(BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl")), ShuffledExecutor(), watch)
    assert (ending.finished, ending.written) == (True, 30)
    assert (ending.pace.done, ending.pace.failed, ending.pace.total) == (30, 2, 30)
    results = _results(home / "out.jsonl")
    assert [row["id"] for row in results] == list(range(30))
    assert results[4]["answer"] == "ROW 4"
    assert "nothing in 'text'" in results[3]["problem"]
    assert "too long" in results[5]["problem"]
    assert watch.gave_way == 4
    assert sorted(answer.row for answer, _ in watch.answers) == list(range(30))
    assert ("ROW 4", "row 4") in [(answer.text, question) for answer, question in watch.answers]
    (job,) = known_jobs()
    assert (job.done, job.failed, job.finished_s is not None) == (30, 2, True)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 40),
    room=st.integers(1, 9),
    stops=st.lists(st.integers(0, 15), max_size=4),
    yields=st.integers(0, 5),
)
def test_stopped_and_resumed_jobs_answer_each_row_once(
    home: Path, tmp_path_factory: pytest.TempPathFactory, seed: int, rows: int, room: int, stops: list[int], yields: int
) -> None:
    folder = tmp_path_factory.mktemp("job")
    _write_rows(folder / "in.jsonl", rows)
    job = BatchJob(str(folder / "in.jsonl"), str(folder / "out.csv"), start="resume")
    seen: list[int] = []
    for stop in stops:
        watch = Watch(yields, cancel_after=stop)
        ending = _run(job, ShuffledExecutor(seed, room), watch)
        seen += [answer.row for answer, _ in watch.answers]
        assert ending.written == ending.pace.done == len(set(seen))
    watch = Watch(yields)
    ending = _run(job, ShuffledExecutor(seed, room), watch)
    seen += [answer.row for answer, _ in watch.answers]
    assert ending.finished
    assert sorted(seen) == list(range(rows))
    assert [row["id"] for row in _results(folder / "out.csv")] == [str(row) for row in range(rows)]


def test_failed_rows_are_asked_again_when_that_is_wanted(home: Path) -> None:
    _write_rows(home / "in.jsonl", 8)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    _run(job, ShuffledExecutor(), Watch())
    executor = ShuffledExecutor()
    ending = _run(replace(job, start="retry_failed"), executor, Watch())
    assert [row for row, _seed in executor.asked] == [5]
    assert (ending.pace.done, ending.pace.failed) == (8, 2)
    executor = ShuffledExecutor()
    assert _run(replace(job, start="resume"), executor, Watch()).finished
    assert executor.asked == []


def test_a_new_job_discards_nothing(home: Path) -> None:
    _write_rows(home / "in.jsonl", 2)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"))
    _run(job, ShuffledExecutor(), Watch())
    with pytest.raises(EngineError, match="begun before"):
        prepare(job)
    with pytest.raises(EngineError, match="the template differed"):
        _run(replace(job, start="resume", template="again {{text}}"), ShuffledExecutor(), Watch())
    executor = ShuffledExecutor()
    _run(replace(job, start="restart", template="again {{text}}"), executor, Watch())
    assert len(executor.asked) == 2
    assert _results(home / "out.jsonl")[0]["answer"] == "AGAIN ROW 0"
    (home / "else.jsonl").write_text("mine")
    with pytest.raises(EngineError, match="exists already"):
        prepare(BatchJob(str(home / "in.jsonl"), str(home / "else.jsonl")))


def test_a_cut_answer_is_tried_again_with_another_seed_and_then_given_up(home: Path) -> None:
    _write_rows(home / "in.jsonl", 3)
    sampled = SamplingParams(temperature=1.0, seed=10)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), choices=("yes", "no"), tries=3, sampling=sampled)
    executor = ShuffledExecutor(cut={0: 2, 1: 99})
    ending = _run(job, executor, Watch())
    assert ending.finished
    assert sorted(executor.asked) == [(0, 10), (0, 11), (0, 13), (1, 10), (1, 11), (1, 13), (2, 10)]
    results = _results(home / "out.jsonl")
    assert [row["answer"] for row in results] == ["yes", "ROW 1", "yes"]
    assert "was cut after" in results[1]["problem"]


def test_a_greedy_answer_that_was_cut_is_not_asked_twice(home: Path) -> None:
    _write_rows(home / "in.jsonl", 1)
    executor = ShuffledExecutor(cut={0: 99})
    _run(BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), choices=("yes",)), executor, Watch())
    assert len(executor.asked) == 1


def test_an_input_that_changes_ends_the_job_and_keeps_its_answers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.batch.job._WATCH_S", 0.0)
    path = home / "in.jsonl"
    _write_rows(path, 40)
    job = BatchJob(str(path), str(home / "out.jsonl"))
    watch = Watch(yields=1)

    def touch_then_change() -> None:
        watch.gave_way += 1
        os.utime(path, ns=(1, 1))
        with open(path, "a") as file:
            file.write('{"text": "one more"}\n')

    watch._give_way = touch_then_change  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="was changed while the job ran"):
        _run(job, ShuffledExecutor(room=10), watch)
    _write_rows(path, 40)
    assert _run(replace(job, start="resume"), ShuffledExecutor(), Watch()).finished


def test_an_input_that_is_only_touched_is_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.batch.job._WATCH_S", 0.0)
    path = home / "in.jsonl"
    _write_rows(path, 20)
    watch = Watch(yields=1)

    def touch() -> None:
        watch.gave_way += 1
        os.utime(path, ns=(1, 1))

    watch._give_way = touch  # type: ignore[method-assign]
    assert _run(BatchJob(str(path), str(home / "out.jsonl")), ShuffledExecutor(), watch).finished


def test_openai_requests_are_answered_in_their_own_format(home: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    lines[1]["url"] = "/v1/embeddings"
    (home / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _run(BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl")), ShuffledExecutor(), Watch())
    answers = [json.loads(line) for line in (home / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in answers] == ["c0", "c2"]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "HI"
    errors = [json.loads(line) for line in (home / "out.errors.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in errors] == ["c1"]
    for wrong in (
        BatchJob(str(home / "in.jsonl"), str(home / "o.csv")),
        BatchJob(str(home / "in.jsonl"), str(home / "o.jsonl"), template="{{custom_id}}"),
    ):
        with pytest.raises(EngineError):
            prepare(wrong)


def test_two_runs_of_one_job_at_once_are_refused(home: Path) -> None:
    _write_rows(home / "in.jsonl", 2)
    job = BatchJob(str(home / "in.jsonl"), str(home / "out.jsonl"), start="restart")
    prepared = prepare(job)
    manifest = prepared.manifest("model", "bf16", lambda: False)
    journal = prepared.open_journal(manifest, "tiny")
    with pytest.raises(EngineError) as refusal:
        prepared.open_journal(manifest, "tiny")
    assert refusal.value.code == ErrorCode.BUSY
    assert journal_path(home / "out.jsonl").exists()
    journal.close()
