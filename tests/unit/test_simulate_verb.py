"""`switchyard simulate` as its users meet it: one JSON document, a table, and mistakes told in one line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import cli
from engine.experts.replay import RoutingTrace, write_trace
from engine.planner.papers import report
from tests.combinations import some

_CELL = ["simulate", "--model", "gpt-oss-20b", "--hardware", "desktop-rtx-3060-12gb", "--workload", "32x8"]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


_rows = cache(report.all_rows)


@pytest.fixture
def predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of the papers, which take seconds."""
    monkeypatch.setattr(report, "all_rows", _rows)


@pytest.mark.usefixtures("predicted_once")
def test_papers(capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, "simulate", "papers")
    fields = {"paper", "table", "cell", "unit", "kind", "published", "predicted", "deviation"}
    assert all(fields <= row.keys() for row in document["rows"])
    assert {row["kind"] for row in document["rows"]} == {"throughput", "derived", "replayed"}
    assert {table["paper"] for table in document["tables"]} == {row["paper"] for row in document["rows"]}
    assert 1 <= len(document["efficiency_factors"]) <= 4
    for row in document["rows"]:
        if not row["bound"]:
            assert row["deviation"] == pytest.approx(row["predicted"] / row["published"] - 1, abs=1e-5)


@pytest.mark.usefixtures("predicted_once")
def test_papers_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "papers"]) == 0
    text = capsys.readouterr().out
    assert "MoE-Lightning, all of it" in text
    assert "deviation" in text
    assert "published: 2.8 TB/s from a card of 1.0 TB/s" in text
    assert "operator_s" in text


def test_rivals(capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, "simulate", "rivals")
    fields = {"program", "result", "model", "machine", "published", "predicted", "ratio", "source", "note"}
    assert all(fields <= row.keys() for row in document["results"])
    for row in document["results"]:
        assert row["ratio"] == pytest.approx(row["predicted"] / row["published"], rel=1e-3)
    assert set(document["median_error"]) == {"all", "fitted", "others"}
    assert document["pairs_right"] <= document["pairs"]


def test_rivals_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "rivals"]) == 0
    text = capsys.readouterr().out
    assert "Strata: RTX 5070\n    https://" in text
    assert "Median error" in text
    assert "pairs right" in text
    assert "handover_s" in text


def test_all_policies_and_a_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, *_CELL)
    assert document["policy"].startswith("Switchyard")
    assert document["tokens_per_s"] == max(entry["tokens_per_s"] for entry in document["policies"])
    assert document["spans_left_out"] == 0
    assert {"phase", "gpu"} <= {span["lane"] for span in document["spans"]}
    assert document["bounds"][0]["policy"] == "ideal prefetch"
    assert document["bottleneck"] in document["utilisation"]


def test_one_policy(capsys: pytest.CaptureFixture[str]) -> None:
    document = told(capsys, *_CELL, "--policy", "FIDDLER", "--precision", "bf16", "--threads", "2")
    assert document["policy"] == "Fiddler"
    assert document["policies"] == []
    assert cli.main([*_CELL, "--policy", "klotski"]) == 0
    assert "Klotski" in capsys.readouterr().out


def test_recorded_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = np.tile(np.arange(4, dtype=np.int16), (32, 24, 1))
    weights = np.full(experts.shape, 0.25, np.float16)
    path = tmp_path / "trace.npz"
    write_trace(RoutingTrace(experts, weights, np.array([0, 32]), 32), path)
    made_up = told(capsys, *_CELL, "--policy", "Switchyard mixed")
    recorded = told(capsys, *_CELL, "--policy", "Switchyard mixed", "--routing", str(path))
    assert recorded["hit_rate"] >= made_up["hit_rate"]
    assert cli.main(["simulate", *_CELL[1:], "--model", "mixtral-8x7b", "--routing", str(path)]) == 2
    assert "trace" in capsys.readouterr().err


@pytest.mark.parametrize("workload", some(["64x8x16", "32x8"], every=4))
def test_the_timeline_as_a_trace(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = tmp_path / "timeline.json", tmp_path / "timeline.csv"
    for file in (path, table):
        document = told(capsys, *_CELL[:-1], workload, "--policy", "switchyard", "--trace", str(file))
    trace = json.loads(path.read_text("utf-8"))
    lanes = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert lanes == {span["lane"] for span in document["spans"]}
    assert len(table.read_text("utf-8").splitlines()) == 1 + len(document["spans"])
    assert cli.main([*_CELL, "--trace", str(tmp_path / "nowhere" / "t.json")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate"], "--model"),
        (["simulate", "--model", "gpt-oss-20b"], "--hardware"),
        ([*_CELL[:3], "--hardware", "toaster"], "'toaster'"),
        (["simulate", "--model", "toaster", *_CELL[3:]], "'toaster'"),
        ([*_CELL, "--workload", "much"], "not a workload"),
        ([*_CELL, "--policy", "magic"], "'magic'"),
        ([*_CELL, "--threads", "0"], "whole number"),
        (["simulate", "peppers"], "invalid choice"),
        ([*_CELL[:1], "--model", "kimi-k2", *_CELL[3:], "--policy", "Fiddler"], "does not fit"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
