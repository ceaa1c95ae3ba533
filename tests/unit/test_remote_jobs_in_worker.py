"""Jobs that other servers answer, in the engine process: each ends once, and the engine has no part in them."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.common.config import HERE, BatchJob, EngineConfig
from engine.common.errors import ErrorCode
from engine.process.remote import RemoteRequests, needs_no_model
from engine.process.requests import RequestQueue
from engine.protocol import (
    BatchFinished,
    BatchProgress,
    BatchRows,
    BatchSampled,
    EndpointKey,
    Event,
    Failed,
    SampleBatch,
    StartBatch,
    decode,
    encode,
)
from engine.remote import spread
from engine.remote.endpoint import Endpoint, save_endpoint
from engine.remote.ray_rows import RayRows
from tests.bad_endpoint import Asked, BadEndpoint
from tests.made_up_ray import MadeUpRay

SECRET = "sk-very-secret-1234567890"


class Process:
    """The part of the engine process that takes jobs, without an engine."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = threading.Condition()
        self.requests = RequestQueue(self._take)
        self.jobs = RemoteRequests(self.requests, self._take)

    def _take(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait_for(self, kind: type | tuple[type, ...]) -> Any:
        def found() -> list[Event]:
            return [each for each in self.events if isinstance(each, kind)]

        with self._news:
            assert self._news.wait_for(found, 30), self.events
        return found()[0]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setattr(spread, "_FIRST_PAUSE_S", 0.02)
    found = Process()
    yield found
    found.requests.close()
    found.jobs.threads.join()


@pytest.fixture
def server() -> Iterator[BadEndpoint]:
    with BadEndpoint(answer=capitals) as found:
        save_endpoint(Endpoint("rack", found.url, price_in=1.0, currency="EUR"))
        yield found


def capitals(asked: Asked) -> None:
    asked.stream(asked.body["messages"][-1]["content"].upper())


def a_job(folder: Path, *endpoints: str, rows: int = 12) -> BatchJob:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(rows)))
    return BatchJob(str(path), str(folder / "out.jsonl"), endpoints=endpoints)


def test_a_job_ends_once_and_says_where_its_rows_are_answered(
    tmp_path: Path, process: Process, server: BadEndpoint
) -> None:
    request = StartBatch("r", a_job(tmp_path, "rack"), (EndpointKey("rack", SECRET),))
    assert SECRET not in repr(request)
    assert decode(encode(request).rstrip(b"\n")) == request
    process.jobs.begin(request)
    ending = process.wait_for(BatchFinished)
    assert (ending.finished, ending.done, ending.failed, ending.written) == (True, 12, 0, 12)
    assert all(asked.key == SECRET for asked in server.posted)
    progress = [event for event in process.events if isinstance(event, BatchProgress)][-1]
    assert decode(encode(progress).rstrip(b"\n")) == progress
    assert [(place.name, place.rows) for place in progress.pace.places] == [("rack", 12)]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 12
    process.jobs.threads.join()
    assert sum(isinstance(event, BatchFinished) for event in process.events) == 1


def test_a_sample_says_what_it_took(tmp_path: Path, process: Process, server: BadEndpoint) -> None:
    process.jobs.begin(SampleBatch("r", a_job(tmp_path, "rack", HERE), 3))
    ending = process.wait_for(BatchFinished)
    assert (ending.finished, ending.done, ending.written) == (True, 3, 0)
    (sampled,) = [event for event in process.events if isinstance(event, BatchSampled)]
    assert (sampled.rows, sampled.prompt_tokens, sampled.currency) == (3, 7, "EUR")
    assert sum(len(event.rows) for event in process.events if isinstance(event, BatchRows)) == 3


def test_a_job_that_is_cancelled_stops_within_a_second_or_so(
    tmp_path: Path, process: Process, server: BadEndpoint
) -> None:
    server.answer = lambda asked: asked.hang()
    process.jobs.begin(StartBatch("r", a_job(tmp_path, "rack")))
    process.wait_for(BatchProgress)
    process.requests.cancel("r")
    assert not process.wait_for(BatchFinished).finished


def test_what_goes_wrong_ends_the_job_with_a_sentence(tmp_path: Path, process: Process, server: BadEndpoint) -> None:
    server.answer = lambda asked: asked.error(401, f"Bad key {SECRET}")
    process.jobs.begin(StartBatch("r", a_job(tmp_path, "rack"), (EndpointKey("rack", SECRET),)))
    failed = process.wait_for(Failed)
    assert failed.code is ErrorCode.ENDPOINT_FAILED
    assert "does not accept the key" in failed.message
    assert SECRET not in failed.message
    process.jobs.begin(StartBatch("s", a_job(tmp_path / "..", "nowhere")))


@pytest.mark.parametrize(
    ("endpoints", "is_sample", "expected"),
    [((), False, False), (("a",), False, True), (("a", HERE), False, False), (("a", HERE), True, True)],
)
def test_only_jobs_for_others_alone_need_no_model(endpoints: tuple[str, ...], is_sample: bool, expected: bool) -> None:
    job = BatchJob("in.csv", "out.csv", endpoints=endpoints)
    request = SampleBatch("r", job, 3) if is_sample else StartBatch("r", job)
    assert needs_no_model(request) is expected


def test_a_job_of_a_cluster_needs_no_model_here_and_runs_there(
    tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = MadeUpRay(["a", "b"])
    monkeypatch.setattr(
        "engine.remote.ray_rows.RayRows", lambda address, asked: RayRows(address, asked, cluster.open, cluster.clock)
    )
    job = replace(a_job(tmp_path), ray="10.0.0.5:6379")
    assert not needs_no_model(SampleBatch("s", job, 3))
    assert needs_no_model(StartBatch("q", job))
    process.jobs.begin(StartBatch("q", job))
    assert "load it here" in process.wait_for(Failed).message
    request = StartBatch("r", job, config=EngineConfig("m", precision="bf16"))
    assert decode(encode(request).rstrip(b"\n")) == request
    process.jobs.begin(request)
    ending = process.wait_for(BatchFinished)
    assert (ending.finished, ending.done, ending.failed) == (True, 12, 0)
    places = [event.pace.places for event in process.events if isinstance(event, BatchProgress)][-1]
    assert [(place.name, place.host) for place in places] == [("a", "a"), ("b", "b")]
    assert cluster.closed
