"""The engine on a node: what it answers, and why it cannot."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from engine.batch_files.rows import Constraint, RowRequest
from engine.checkpoint.shards import content_digest
from engine.common.chat import ChatMessage
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.installed import version
from engine.process.ray_node import RayNode
from tests.engine.tiny_families import tiny_checkpoint


def asked(row: int, constraint: Constraint | None = None) -> dict[str, Any]:
    request = RowRequest(row, (ChatMessage("user", f"Row {row}?"),), SamplingParams(max_tokens=6), constraint)
    fields: dict[str, Any] = json.loads(json.dumps(asdict(request)))  # as it comes over the pipe
    return fields


def spec(model: Path | str, **other: Any) -> dict[str, Any]:
    config = asdict(EngineConfig("m", device="cpu", threads=1, precision="bf16"))
    job = json.loads(json.dumps(asdict(BatchJob("a", "b"))))
    first = {"version": version(), "models": [str(model)], "digest": "", "config": config, "job": job}
    return {**first, "sample": [[1.0, asked(0)]], **other}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("node") / "tiny")


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured, unless a test wants it."""
    monkeypatch.setattr("engine.tuning.untuned.measure_untuned", lambda *_: False)


@pytest.fixture
def node() -> Iterator[RayNode]:
    made = RayNode()
    yield made
    made.close()


def test_rows_are_answered_while_others_come(node: RayNode, model: Path) -> None:
    about = node.open(spec(model, digest=content_digest(model)))
    assert (about["precision"], about["device"], about["digest"]) == ("bf16", "cpu", content_digest(model))
    given, found = 0, dict[int, dict[str, Any]]()
    while len(found) < 40:
        if given < 40:
            node.give([[100 + given + more, asked(given + more)] for more in range(4)])
            given += 4
        taken = node.take(20.0)
        assert taken["broken"] == ""
        for ticket, answer in taken["answers"]:
            assert ticket not in found
            found[ticket] = answer
    assert sorted(found) == list(range(100, 140))
    assert json.loads(json.dumps(found[100]))["finish_reason"] in ("length", "stop")


def test_a_node_says_what_it_does_and_what_its_plan_predicts(
    node: RayNode, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, may_go_on = list[str](), threading.Event()

    def measured(config: EngineConfig, on_begin: Callable[[], None], _cancelled: object) -> bool:
        assert (config.model, config.threads) == (str(model), 1)
        on_begin()
        return may_go_on.wait(20)

    def listen() -> None:
        while not said or said[-1]:
            said.append(node.doing(said[-1] if said else ""))
            if said[-1] == "measures itself":
                may_go_on.set()

    monkeypatch.setattr("engine.tuning.untuned.measure_untuned", measured)
    listener = threading.Thread(target=listen)
    listener.start()
    about = node.open(spec(model))
    listener.join(20)
    assert about["measured"]
    assert about["rows_per_s"] > 0
    assert [each for each in said if each != "starts"] in (
        ["measures itself", "loads the model", ""],
        ["measures itself", ""],
    )


def test_an_answer_keeps_to_its_choices_and_a_bad_row_fails_alone(node: RayNode, model: Path) -> None:
    assert "refused" not in node.open(spec(model))
    node.give([[1, asked(1, Constraint(choices=("yes", "no")))], [2, {**asked(2), "messages": []}]])
    found = dict[int, dict[str, Any]]()
    while len(found) < 2:
        found |= dict(node.take(20.0)["answers"])
    assert found[1]["text"] in ("yes", "no")
    assert found[2]["error"]


def test_rows_that_others_have_answered_are_left_out(model: Path) -> None:
    node = RayNode()
    node.give([[ticket, asked(ticket)] for ticket in range(9)])
    node.drop([0, 3, 8])
    assert [row.row for row in node._waiting_rows()] == [1, 2, 4, 5, 6, 7]


def test_rows_that_come_in_the_middle_of_a_sweep_do_not_stop_it() -> None:
    """A run reads rows when a sweep has ended, and was told to give way until it had read them."""
    node, asked_to_yield = RayNode(), list[bool]()

    class InTheMiddle:
        def run(self, rows: Iterator[RowRequest], _on_row: Any, should_yield: Callable[[], bool], _stop: Any) -> None:
            asked_to_yield.append(should_yield())
            assert next(rows, None) is not None
            assert next(rows, None) is None
            node.give([[9, asked(9)]])
            asked_to_yield.append(should_yield())

    node.give([[1, asked(1)]])
    for _ in range(2):
        node._answer_rows(InTheMiddle())  # type: ignore[arg-type]
    assert asked_to_yield == [False, True, False, True]


def test_a_node_with_other_files_or_another_version_says_so(model: Path, tmp_path: Path) -> None:
    assert "are not those of the computer that asks" in RayNode().open(spec(model, digest="other"))["refused"]
    assert RayNode().open(spec(model, version="0.0.1"))["refused"].startswith("it has Switchyard ")
    nowhere = RayNode().open(spec(tmp_path / "nowhere"))["refused"]
    assert nowhere.startswith("it does not have the model: ")


def test_a_node_without_room_says_so(model: Path) -> None:
    config = asdict(replace(EngineConfig("m", device="cpu", precision="bf16"), ram_bytes=1000))
    assert "RAM" in RayNode().open(spec(model, config=config))["refused"]
