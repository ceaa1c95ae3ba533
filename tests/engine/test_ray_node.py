"""The engine on a node: what it answers, and why it cannot."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.batch_files.rows import Answer, Constraint, RowRequest
from engine.checkpoint.shards import content_digest
from engine.common.chat import ChatMessage
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.installed import version
from engine.process.ray_node import RayNode
from engine.protocol import (
    ClusterJob,
    DropRows,
    GiveRows,
    NodeDoes,
    NodeGone,
    NodeReady,
    StartNode,
    decode,
    encode,
)
from tests.engine.tiny_families import tiny_checkpoint


def asked(row: int, constraint: Constraint | None = None) -> RowRequest:
    return RowRequest(row, (ChatMessage("user", f"Row {row}?"),), SamplingParams(max_tokens=6), constraint)


def begun(node: RayNode, model: Path | str, asked_by: str = "", digest: str = "", **other: Any) -> NodeReady | NodeGone:
    """What it says once it can answer rows, or cannot."""
    config = EngineConfig("m", **{"device": "cpu", "threads": 1, "precision": "bf16", **other})
    job = ClusterJob((str(model),), digest, config, BatchJob("a", "b"), ((1.0, asked(0)),))
    start = StartNode("n", 1, 1.0, 0.0, job)
    node.begin("n", 1, asked_by or version(), encode(start))
    while True:
        for event in said_by(node):
            if isinstance(event, NodeReady | NodeGone):
                return event


def said_by(node: RayNode) -> list[Any]:
    lines, is_over = node.events(20.0)
    said = [decode(line) for line in lines]
    assert is_over == any(isinstance(event, NodeGone) for event in said)
    return said


def give(node: RayNode, *rows: RowRequest) -> None:
    node.tell(encode(GiveRows("n", 1, rows)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("node") / "tiny")


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured, unless a test wants it."""
    monkeypatch.setattr("engine.tuning.untuned.measure_untuned", lambda *_: False)


@pytest.fixture
def node() -> Iterator[RayNode]:
    with closing(RayNode()) as made:
        yield made


def test_rows_are_answered_while_others_come(node: RayNode, model: Path) -> None:
    ready = begun(node, model, digest=content_digest(model))
    assert (ready.precision, ready.digest) == ("bf16", content_digest(model))
    assert ready.rows_per_s > 0
    given, found = 0, dict[int, Answer]()
    while len(found) < 40:
        if given < 40:
            give(node, *(asked(100 + given + more) for more in range(4)))
            given += 4
        for event in said_by(node):
            for answer in event.answers:
                assert answer.row not in found
                found[answer.row] = answer
    assert sorted(found) == list(range(100, 140))
    assert found[100].finish_reason in ("length", "stop")


def test_a_node_says_what_it_does(node: RayNode, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()

    def measured(config: EngineConfig, on_begin: Callable[[], None], _cancelled: object) -> bool:
        assert (config.model, config.threads) == (str(model), 1)
        on_begin()
        return may_go_on.wait(20)

    monkeypatch.setattr("engine.tuning.untuned.measure_untuned", measured)
    said = list[NodeDoes]()
    heard = node.events

    def hear(wait_s: float) -> tuple[list[bytes], bool]:
        lines, is_over = heard(wait_s)
        said.extend(event for event in map(decode, lines) if isinstance(event, NodeDoes))
        may_go_on.set()
        return lines, is_over

    monkeypatch.setattr(node, "events", hear)
    assert isinstance(begun(node, model), NodeReady)
    assert [event.what for event in said] == ["measures itself", "loads the model"]


def test_an_answer_keeps_to_its_choices_and_a_bad_row_fails_alone(node: RayNode, model: Path) -> None:
    assert isinstance(begun(node, model), NodeReady)
    give(node, asked(1, Constraint(choices=("yes", "no"))), replace(asked(2), messages=()))
    found = dict[int, Answer]()
    while len(found) < 2:
        found |= {answer.row: answer for event in said_by(node) for answer in event.answers}
    assert found[1].text in ("yes", "no")
    assert found[2].problem


def test_rows_that_others_have_answered_are_left_out() -> None:
    node = RayNode()
    give(node, *map(asked, range(9)))
    node.tell(encode(DropRows("n", 1, (0, 3, 8))))
    assert [row.row for row in node._waiting_rows()] == [1, 2, 4, 5, 6, 7]


def test_rows_that_come_in_the_middle_of_a_sweep_do_not_stop_it() -> None:
    """A run reads rows when a sweep has ended, and was told to give way until it had read them."""
    node, asked_to_yield = RayNode(), list[bool]()

    class InTheMiddle:
        def run(self, rows: Iterator[RowRequest], _on_row: Any, should_yield: Callable[[], bool], _stop: Any) -> None:
            asked_to_yield.append(should_yield())
            assert next(rows, None) is not None
            assert next(rows, None) is None
            give(node, asked(9))
            asked_to_yield.append(should_yield())

    give(node, asked(1))
    for _ in range(2):
        node._answer_rows(InTheMiddle())  # type: ignore[arg-type]
    assert asked_to_yield == [False, True, False, True]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"digest": "other"}, "are not those of the computer that asks"),
        ({"asked_by": "0.0.1"}, "it has Switchyard "),
        ({"model": "nowhere"}, "it does not have the model: "),
        ({"ram_bytes": 1000}, "RAM"),
    ],
)
def test_a_node_that_cannot_says_why(node: RayNode, model: Path, given: dict[str, Any], why: str) -> None:
    gone = begun(node, **{"model": model, **given})
    assert gone.refuses
    assert why in gone.why
