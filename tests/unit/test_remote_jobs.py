"""Jobs at endpoints that do everything wrong: every row has one answer, and what went wrong is said."""

import json
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace
from engine.batch_files.journal import known_jobs
from engine.batch_files.opening import open_source
from engine.batch_files.prepared_job import PreparedJob, prepare
from engine.batch_files.rows import Answer, RowRequest
from engine.common.config import HERE, BatchJob, SamplingParams
from engine.common.errors import EngineError
from engine.common.paths import jobs_dir
from engine.jobs.job import Answerer
from engine.jobs.rows import BatchOutcome, Check, RowCallback
from engine.remote import spread
from engine.remote.client import Client, Patience
from engine.remote.endpoint import Endpoint, save_endpoint
from engine.remote.job import OwnModel, run_remote_job, run_remote_sample
from tests.bad_endpoint import Asked, BadEndpoint, write_certificate

SECRET = "sk-very-secret-1234567890"
ROWS = 24


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(spread, "_LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(spread, "_OUT_PAUSE_S", 0.05)


@pytest.fixture
def good() -> Iterator[BadEndpoint]:
    with BadEndpoint(answer=capitals) as found:
        yield found


def capitals(asked: Asked) -> None:
    asked.stream(asked.body["messages"][-1]["content"].upper())


def now_and_then(wrong: Callable[[Asked], None]) -> Callable[[Asked], None]:
    """Every other request goes wrong."""
    chance, lock = random.Random(3), threading.Lock()

    def answer(asked: Asked) -> None:
        with lock:
            is_wrong = chance.random() < 0.5
        (wrong if is_wrong else capitals)(asked)

    return answer


def cut(asked: Asked) -> None:
    asked.begin_stream()
    asked.chunk({"content": "HALF"})


def twice(asked: Asked) -> None:
    capitals(asked)
    asked.stream("ANOTHER")


WRONG: dict[str, Callable[[Asked], None]] = {
    "429": lambda asked: asked.error(429, "Too many requests."),
    "429 with a time": lambda asked: asked.error(429, "Too many requests.", retry_after="0.05"),
    "500": lambda asked: asked.error(500, "CUDA error"),
    "503": lambda asked: asked.error(503, "Loading"),
    "half a JSON": lambda asked: asked.send(200, b'{"choices": [{"mess', content_type="application/json"),
    "a stream that stops": cut,
    "nothing": lambda asked: asked.hang(),
    "two answers": twice,
}


class Watch:
    """Looks on, and can stop the job."""

    def __init__(self, patience_s: float | None = None) -> None:
        self.paces: list[tuple[Pace, str]] = []
        self.answers: list[Answer] = []
        self.stop = threading.Event()
        self._patience_s = patience_s

    def watcher(self) -> JobWatcher:
        return JobWatcher(
            on_pace=lambda pace, blocked: self.paces.append((pace, blocked)),
            on_answer=lambda answer, _question: self.answers.append(answer),
            should_yield=lambda: False,
            give_way=lambda: None,
            cancelled=self.stop.is_set,
            patience_s=self._patience_s,
        )


def add(name: str, server: BadEndpoint, **more: Any) -> str:
    save_endpoint(Endpoint(name, server.url, **more))
    return name


def make(endpoint: Endpoint) -> Client:
    return Client(endpoint, SECRET, Patience(connect_s=2, first_s=0.3, next_s=0.3, look_s=2))


def a_job(folder: Path, endpoints: Sequence[str], rows: int = ROWS, **more: Any) -> BatchJob:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(rows)))
    return BatchJob(str(path), str(folder / "out.jsonl"), endpoints=tuple(endpoints), **more)


def run(job: BatchJob, watch: Watch | None = None, own: OwnModel | None = None) -> JobEnding:
    return run_remote_job(prepare(job), (watch or Watch()).watcher(), own, make)


def results(job: BatchJob) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in open_source(Path(job.output)).rows()]


def is_whole(job: BatchJob, rows: int = ROWS) -> bool:
    return [row["answer"] for row in results(job)] == [f"ROW {row}" for row in range(rows)]


@pytest.mark.parametrize("wrong", WRONG)
def test_every_row_is_answered_whatever_a_server_does_now_and_then(
    tmp_path: Path, good: BadEndpoint, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with BadEndpoint(answer=now_and_then(WRONG[wrong])) as bad:
        job = a_job(tmp_path, [add("good", good), add("bad", bad)])
        watch = Watch()
        ending = run(job, watch)
    assert (ending.finished, ending.pace.failed) == (True, 0)
    assert is_whole(job)
    assert sorted(answer.row for answer in watch.answers) == list(range(ROWS))
    assert {answer.by for answer in watch.answers} <= {"good", "bad"}
    assert sum(place.rows for place in ending.pace.places) == ROWS
    assert SECRET not in caplog.text
    for path in jobs_dir().iterdir():
        assert SECRET.encode() not in path.read_bytes()


def test_a_row_that_a_server_refuses_fails_and_says_why(tmp_path: Path) -> None:
    def answer(asked: Asked) -> None:
        if asked.body["messages"][-1]["content"] == "row 5":
            asked.error(400, "This prompt is not allowed.")
        else:
            capitals(asked)

    with BadEndpoint(answer=answer) as server:
        job = a_job(tmp_path, [add("one", server)])
        ending = run(job)
        asked = [each.body["messages"][-1]["content"] for each in server.posted]
    assert (ending.finished, ending.pace.failed) == (True, 1)
    assert "not allowed" in results(job)[5]["problem"]
    assert asked.count("row 5") == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda asked: asked.error(401, "Expired"), "does not accept the key"),
        (lambda asked: asked.error(404, "The model does not exist.", "model_not_found"), "has no model"),
    ],
)
def test_an_endpoint_that_needs_somebody_rests_and_says_so(
    tmp_path: Path, good: BadEndpoint, answer: Callable[[Asked], None], why: str
) -> None:
    with BadEndpoint(answer=answer) as bad:
        job = a_job(tmp_path, [add("good", good), add("bad", bad)])
        ending = run(job)
        assert is_whole(job)
        (place,) = (place for place in ending.pace.places if place.name == "bad")
        assert (place.state, place.rows) == ("out", 0)
        assert why in place.why
        alone = a_job(tmp_path / "..", ["bad"])
        with pytest.raises(EngineError, match=why):
            run(replace(alone, output=str(tmp_path / "alone.jsonl")))


def test_a_certificate_that_is_wrong_takes_only_that_endpoint_out(tmp_path: Path, good: BadEndpoint) -> None:
    both, _ = write_certificate(tmp_path)
    with BadEndpoint(certificate=both, answer=capitals) as bad:
        job = a_job(tmp_path, [add("good", good), add("bad", bad)])
        ending = run(job)
    assert is_whole(job)
    assert "certificate" in next(place.why for place in ending.pace.places if place.name == "bad")
    assert bad.posted == []


def test_a_job_whose_servers_are_gone_waits_and_says_so(tmp_path: Path) -> None:
    server = BadEndpoint(answer=capitals)
    with server:
        name = add("gone", server)
    job = a_job(tmp_path, [name])
    watch = Watch(patience_s=0.3)
    with pytest.raises(EngineError, match=r"Nobody answered for 0 s\. gone .*refused") as ended:
        run(job, watch)
    assert "kept" in ended.value.message
    watch = Watch()
    threading.Timer(0.8, watch.stop.set).start()
    assert not run(replace(job, start="resume"), watch).finished
    assert any("gone: " in blocked and "asked again" in blocked for _pace, blocked in watch.paces)


def test_a_stopped_job_goes_on_with_other_endpoints_and_says_who_answered_before(
    tmp_path: Path, good: BadEndpoint
) -> None:
    with BadEndpoint(answer=capitals) as first:
        job = a_job(tmp_path, [add("first", first)], name_endpoints=True)
        watch = Watch()

        def answer(asked: Asked) -> None:
            capitals(asked)
            if len(first.posted) > 6:
                watch.stop.set()

        first.answer = answer
        assert not run(job, watch).finished
    again = replace(job, start="resume", endpoints=(add("good", good),))
    ending = run(again)
    assert ending.finished
    assert is_whole(job)
    assert "Earlier rows were answered by first" in ending.note
    by = {row["endpoint"] for row in results(job)}
    assert by == {"first", "good"}
    (known,) = known_jobs()
    assert {name for name, *_ in known.endpoints} == by
    assert sum(rows for _name, rows, _tokens in known.endpoints) == ROWS


def test_another_model_does_not_add_to_a_jobs_answers_unless_that_was_agreed(tmp_path: Path, good: BadEndpoint) -> None:
    job = a_job(tmp_path, [add("good", good)])
    run(job)
    with BadEndpoint(answer=capitals, models=("other/model",)) as other:
        again = replace(job, start="resume", endpoints=("good", add("other", other)))
        with pytest.raises(EngineError, match="given by some/model, and now other/model would"):
            run(again)
        assert run(replace(again, mix_models=True)).finished


def test_answers_that_break_their_schema_are_tried_again_and_then_fail(tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    def answer(asked: Asked) -> None:
        assert asked.body["response_format"]["type"] == "json_schema"
        question = asked.body["messages"][-1]["content"]
        tries[question] = tries.get(question, 0) + 1
        is_good = question != "row 2" and tries[question] > 1
        asked.stream('```json\n{"n": 3}\n```' if is_good else '{"n": "three"}')

    with BadEndpoint(answer=answer) as server:
        schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
        job = a_job(tmp_path, [add("one", server)], 4, schema=schema, tries=3)
        ending = run(job)
    assert ending.pace.failed == 1
    assert [row["answer"] for row in results(job)] == ['{"n": 3}', '{"n": 3}', '{"n": "three"}', '{"n": 3}']
    assert "does not satisfy its schema" in results(job)[2]["problem"]
    assert tries == {"row 0": 2, "row 1": 2, "row 2": 3, "row 3": 2}


def test_a_sample_measures_rows_tokens_and_cost(tmp_path: Path, good: BadEndpoint) -> None:
    job = a_job(tmp_path, [add("good", good, price_in=10.0, price_out=100.0, currency="EUR")])
    watch = Watch()
    sample = run_remote_sample(prepare(job), 3, watch.watcher(), None, make)
    assert (sample.rows, sample.prompt_tokens, sample.generated_tokens, sample.currency) == (3, 7, 3, "EUR")
    assert sample.cost == pytest.approx((7 * 10 + 3 * 100) / 1e6)
    assert len(watch.answers) == 3
    assert not Path(job.output).exists()


class Here:
    """Stands for this machine's own model: a row at a time, unless it breaks."""

    note = ""
    waits = ""
    places = ()

    def __init__(self, breaks_after: int = 10**6) -> None:
        self._held: list[RowRequest] = []
        self._left = breaks_after
        self.is_closed = False
        self.answerer = Answerer("tiny", "digest", "bf16")

    def open(self, _prepared: PreparedJob, _watcher: JobWatcher) -> "tuple[Here, int]":
        return self, 4

    @property
    def under_way(self) -> tuple[int, int]:
        return len(self._held), 0

    def run(
        self, rows: Iterator[RowRequest], on_row: RowCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        if should_yield():  # as the engine: it looks before it reads
            return BatchOutcome.YIELDED
        self._held += rows
        while self._held:
            if cancelled():
                return BatchOutcome.CANCELLED
            if should_yield():
                return BatchOutcome.YIELDED
            self._left -= 1
            if self._left < 0:
                raise EngineError(spread_code(), "The model broke.")
            row = self._held.pop()
            threading.Event().wait(0.005)
            on_row(Answer(row.row, row.messages[-1].content.upper(), "stop", 2, 2))
        return BatchOutcome.FINISHED

    def close(self) -> None:
        self.is_closed = True


def spread_code() -> Any:
    from engine.common.errors import ErrorCode

    return ErrorCode.NOT_ENOUGH_MEMORY


@pytest.mark.parametrize("breaks_after", [10**6, 5])
def test_this_pc_is_one_of_the_places(tmp_path: Path, good: BadEndpoint, breaks_after: int) -> None:
    def slowly(asked: Asked) -> None:
        threading.Event().wait(0.01)
        capitals(asked)

    good.answer = slowly
    own = Here(breaks_after)
    job = a_job(tmp_path, [add("good", good), HERE], 60, sampling=SamplingParams(max_tokens=9), name_endpoints=True)
    ending = run(job, own=own)
    assert ending.finished
    assert is_whole(job, 60)
    assert own.is_closed
    assert {row["endpoint"] for row in results(job)} == {"good", HERE}
    (here,) = (place for place in ending.pace.places if not place.name)
    assert here.state == ("working" if breaks_after > 60 else "out")
    assert here.host == ""


def test_endpoints_that_are_not_there_are_refused_in_one_sentence(tmp_path: Path, good: BadEndpoint) -> None:
    with pytest.raises(EngineError, match="no endpoint called"):
        run(a_job(tmp_path, ["nowhere"]))
    with pytest.raises(EngineError, match="named twice"):
        run(a_job(tmp_path, [add("good", good), "GOOD"]))
    with pytest.raises(EngineError, match="no model is loaded"):
        run(a_job(tmp_path, ["good", HERE]))
