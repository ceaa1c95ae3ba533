"""A job's rows on a made-up cluster: every row is answered once, and what keeps a node from that is said."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, RowRequest
from engine.common.chat import ChatMessage
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.jobs.rows import BatchOutcome, never
from engine.protocol import ClusterJob, ClusterNode, NodeDoes
from engine.remote import ray_rows as ray_job
from engine.remote.ray_rows import MOST_FAILURES, RayRows
from tests.engine.shuffled_executor import results_in, write_rows
from tests.made_up_ray import MadeUpRay
from tests.refusals import refused


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.remote.ray_rows._WAIT_S", 0.0)


def rows_of(count: int) -> list[RowRequest]:
    return [RowRequest(row, (ChatMessage("user", f"row {row}"),), SamplingParams()) for row in range(count)]


def opened(cluster: MadeUpRay, *, precision: str = "bf16", digest: str = "d", **config: int) -> RayRows:
    engine = EngineConfig("m", precision=precision, **config)  # type: ignore[arg-type]
    asked = ClusterJob(("m",), digest, engine, BatchJob("a", "b"), ((1.0, rows_of(1)[0]),))
    return RayRows("10.0.0.5:6379", asked, cluster.open, lambda: _passing(cluster))


def _passing(cluster: MadeUpRay) -> float:
    cluster.now += 0.2 if cluster.closed else 0.001  # also while there is no link
    return cluster.now


def answered(rows: RayRows, count: int, cluster: MadeUpRay) -> list[Answer]:
    found = list[Answer]()
    assert rows.open(never)
    outcome = rows.run(iter(rows_of(count)), found.append, never, never)
    assert outcome is BatchOutcome.FINISHED
    rows.close()
    assert cluster.closed
    return found


def test_rows_are_spread_and_each_is_answered() -> None:
    cluster = MadeUpRay(["a", "b", "c"])
    rows = opened(cluster)
    found = answered(rows, 500, cluster)
    assert {answer.row: answer.text for answer in found} == {row: f"ROW {row}" for row in range(500)}
    assert len(found) == 500
    assert {place.name: place.rows > 100 for place in rows.places} == {"a": True, "b": True, "c": True}


@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, 300), nodes=st.integers(1, 4), trouble=st.floats(0, 0.3), seed=st.integers(0, 10**6))
def test_every_row_is_answered_once_whatever_happens(count: int, nodes: int, trouble: float, seed: int) -> None:
    cluster = MadeUpRay([f"n{number}" for number in range(nodes)], 3, random.Random(seed), trouble)
    rows = opened(cluster)
    found = answered(rows, count, cluster)
    assert sorted(answer.row for answer in found) == list(range(count))
    assert all(answer.text == f"ROW {answer.row}" or answer.problem for answer in found)


def test_a_job_that_gives_way_goes_on_where_it_was() -> None:
    cluster = MadeUpRay(["a"], speed=2)
    rows, source, found = opened(cluster), iter(rows_of(40)), list[Answer]()
    assert rows.open(never)
    outcome, looks = BatchOutcome.YIELDED, 0
    while outcome is BatchOutcome.YIELDED:
        looks += 1
        left = iter([False, False, True])
        outcome = rows.run(source, found.append, lambda left=left: next(left), never)  # type: ignore[misc]
    assert sorted(answer.row for answer in found) == list(range(40))
    assert looks > 5
    rows.close()


def test_a_cancelled_job_leaves_nothing_behind() -> None:
    cluster = MadeUpRay(["a"], speed=1)
    rows, found = opened(cluster), list[Answer]()
    assert rows.open(never)
    assert rows.run(iter(rows_of(40)), found.append, never, lambda: len(found) > 3) is BatchOutcome.CANCELLED
    rows.close()
    rows.close()
    assert cluster.engines == {}
    assert not RayRows("x", rows._asked, cluster.open, cluster.clock).open(lambda: True)


def test_an_engine_that_died_is_started_again_after_a_pause() -> None:
    cluster = MadeUpRay(["a"], speed=1)
    looks = 0

    def look(it: MadeUpRay) -> None:
        nonlocal looks
        looks += 1
        if looks == 10:
            it.kill("a")

    cluster.on_look = look
    assert len(answered(opened(cluster), 20, cluster)) == 20
    assert [each.node for each in cluster.started] == ["a", "a"]


def test_a_node_whose_engine_always_dies_is_left_alone() -> None:
    cluster = MadeUpRay(["a", "b"])
    cluster.on_look = lambda it: it.kill("b", "its process ended")
    rows = opened(cluster)
    assert rows.open(never)
    while sum(each.node == "b" for each in cluster.started) <= MOST_FAILURES:
        rows._step()
    for _ in range(50):
        rows._step()
    assert sum(each.node == "b" for each in cluster.started) == MOST_FAILURES + 1
    assert rows.note == "b was not used: its process ended, 7 times in a row."
    rows.close()


def test_a_node_without_room_is_said_and_not_used() -> None:
    cluster = MadeUpRay(["a", "b"])
    cluster.refusals["b"] = "Not enough memory: 20 GB are needed, and 4 GB are free."
    rows = opened(cluster)
    assert len(answered(rows, 30, cluster)) == 30
    assert rows.note == "b was not used: Not enough memory: 20 GB are needed, and 4 GB are free."
    assert {place.name: place.state for place in rows.places} == {"a": "working", "b": "out"}
    assert {node for node, _row in cluster.answered} == {"a"}


def test_a_cluster_where_no_node_can_answer_is_one_sentence() -> None:
    cluster = MadeUpRay(["a", "b"])
    cluster.refusals |= {"a": "it does not have the model", "b": "it has Switchyard 0.0.9"}
    rows = opened(cluster)
    with pytest.raises(EngineError, match=r"No node .*a: it does not have the model; b: it has Switchyard 0.0.9"):
        rows.open(never)
    rows.close()


def test_the_first_node_decides_the_precision_of_all() -> None:
    cluster = MadeUpRay(["a", "b"])
    cluster.nodes["b"] = replace(cluster.node("b"), memory=10**11)
    rows = opened(cluster, precision="auto", digest="")
    assert rows.open(never)
    assert rows.model == ("d", "int8")
    rows._round_s = 0.0
    rows._step()
    assert [(each.node, each.asked.config.precision) for each in cluster.started] == [("b", "auto"), ("a", "int8")]
    rows.close()


def test_what_a_node_does_before_it_answers_is_said() -> None:
    cluster = MadeUpRay(["a"])
    rows = opened(cluster)
    while not cluster.started:
        rows._step()
    assert rows.waits == "No node answers yet. a starts."
    cluster.said.insert(0, NodeDoes("a", 1, "measures itself"))
    opening = cluster.said.pop()
    rows._step()
    assert rows.waits == "No node answers yet. a measures itself."
    assert [(place.state, place.why) for place in rows.places] == [("starting", "a measures itself.")]
    cluster.said.append(opening)
    rows._step()
    assert rows.waits == ""
    rows.close()


def test_nodes_on_one_machine_share_it() -> None:
    cluster = MadeUpRay([])
    for name in ("a", "b"):
        cluster.nodes[name] = ClusterNode(name, "one", "one", 2.0, 0.0, 3 * 10**9)
    cluster.nodes["c"] = cluster.node("c")
    rows = opened(cluster)
    assert rows.open(never)
    may = {each.node: (each.asked.config.ram_bytes, each.asked.config.threads) for each in cluster.started}
    assert may == {"a": (3 * 10**9, 2), "b": (3 * 10**9, 2), "c": (None, None)}
    assert {place.name for place in rows.places} == {"one (a)", "one (b)", "c"}
    rows.close()


def test_a_cluster_that_cannot_be_reached_is_one_sentence() -> None:
    cluster = MadeUpRay(["a"])
    cluster.unreachable = "No Ray cluster answers at 10.0.0.5:6379: check the address."
    with refused(ErrorCode.DEVICE_UNAVAILABLE, match="No Ray cluster answers"):
        opened(cluster).open(never)


def test_a_cluster_that_never_says_anything_is_one_sentence() -> None:
    cluster = MadeUpRay(["a"])
    rows = opened(cluster)
    cluster.events = lambda _wait_s: []  # type: ignore[method-assign]
    cluster.closed = True  # its clock goes on
    with pytest.raises(EngineError, match=r"10.0.0.5:6379 does not answer: check the address, and that it runs"):
        rows.open(never)


def test_a_lost_cluster_is_waited_for_and_then_given_up() -> None:
    cluster = MadeUpRay(["a"], speed=1)
    rows, waits = opened(cluster), set[str]()
    assert rows.open(never)
    cluster.end_link()
    cluster.unreachable = "it is off"

    def look() -> bool:
        waits.add(rows.waits)
        return False

    with pytest.raises(EngineError, match="can answer"):
        rows.run(iter(rows_of(5)), lambda _answer: None, look, never)
    assert "The Ray cluster at 10.0.0.5:6379 was lost (it is off): it is tried again." in waits
    assert cluster.links > 3
    rows.close()


def run_job(
    folder: Path, cluster: MadeUpRay, monkeypatch: pytest.MonkeyPatch, stop: Callable[[int], bool] = lambda _done: False
) -> JobEnding:
    monkeypatch.setattr(
        ray_job, "RayRows", lambda address, asked: RayRows(address, asked, cluster.open, lambda: _passing(cluster))
    )
    job = BatchJob(str(folder / "in.jsonl"), str(folder / "out.jsonl"), start="resume", ray="auto")
    done, paces = 0, list[Pace]()

    def on_answer(*_: object) -> None:
        nonlocal done
        done += 1

    watcher = JobWatcher(lambda pace, _why: paces.append(pace), on_answer, never, lambda: None, lambda: stop(done))
    return ray_job.run_cluster_job(prepare(job), EngineConfig("m"), watcher)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    return tmp_path


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), stops=st.lists(st.integers(1, 30), max_size=3))
def test_a_job_is_resumed_where_it_was(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, seed: int, stops: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("job")
    write_rows(folder / "in.jsonl", 40)
    chance = random.Random(seed)
    for most in [*stops, 10**6]:
        cluster = MadeUpRay(["a", "b"], 3, chance, 0.1)
        ending = run_job(folder, cluster, monkeypatch, lambda done, most=most: done >= most)  # type: ignore[misc]
        assert cluster.closed
    assert ending.finished
    assert [row["id"] for row in results_in(folder / "out.jsonl")] == list(range(40))


def test_a_job_stopped_before_a_node_answers_has_no_result(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(home / "in.jsonl", 3)
    cluster = MadeUpRay([])
    assert not run_job(home, cluster, monkeypatch, lambda _done: True).finished
    assert cluster.closed
    assert not (home / "out.jsonl").exists()
