"""`switchyard simulate` as users meet it, and what it says beside published figures: order, medians, few factors."""

import json
import math
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import cli
from engine.experts.replay import RoutingTrace, write_trace
from engine.planner.costs import EFFICIENCY, Costs, Efficiency
from engine.planner.papers import DERIVED, FAR_OFF, THROUGHPUT, PublishedCell, fiddler, moe_lightning, report
from engine.planner.papers.report import (
    SAME,
    document,
    factors,
    median_deviation,
    rank_correlation,
    summaries,
)

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


def test_the_timeline_as_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = tmp_path / "timeline.json", tmp_path / "timeline.csv"
    document = told(capsys, *_CELL[:-1], "16x4x16", "--policy", "switchyard", "--trace", str(path))
    trace = json.loads(path.read_text("utf-8"))
    lanes = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert lanes == {span["lane"] for span in document["spans"]}
    document = told(capsys, *_CELL, "--policy", "switchyard", "--trace", str(table))
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


@pytest.fixture(scope="module")
def rows() -> list[PublishedCell]:
    return _rows()


def of(rows: list[PublishedCell], paper: str, table: str) -> list[PublishedCell]:
    return [row for row in rows if row.paper == paper and row.table.startswith(table)]


def test_every_row_is_a_number_beside_a_number(rows: list[PublishedCell]) -> None:
    assert len({(row.paper, row.table, row.cell) for row in rows}) == len(rows)
    for row in rows:
        assert row.kind in (THROUGHPUT, DERIVED)
        assert row.published > 0
        assert row.predicted > 0
        assert math.isfinite(row.predicted)


def test_all_published_tables_are_there(rows: list[PublishedCell]) -> None:
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row.paper] += 1
    assert set(counts) == {"CPU-GPU Collaborative", "Fiddler", "DuoServe-MoE", "MoE-Lightning", "Klotski"}
    assert len(of(rows, "MoE-Lightning", "4: s")) == 16
    assert len(of(rows, "MoE-Lightning", "5")) == 4
    assert len(of(rows, "Klotski", "3")) == 15
    assert len(of(rows, "DuoServe-MoE", "2")) == 8
    assert len(of(rows, "Fiddler", "appendix C")) == 6
    assert len(of(rows, "CPU-GPU Collaborative", "III, computing")) == 14


def test_the_rank_order_is_right_in_every_table(rows: list[PublishedCell]) -> None:
    for table in summaries(rows):
        assert table.rank_correlation is None or table.rank_correlation >= 0.9, table
    for cells in groups(rows):
        assert len({row.unit for row in cells}) == 1
        clear = [(low, high) for low in cells for high in cells if high.published > low.published * (1 + SAME)]
        wrong = [(low.cell, high.cell) for low, high in clear if high.predicted < low.predicted * (1 - SAME)]
        assert not wrong, cells[0].table


def groups(rows: list[PublishedCell]) -> list[list[PublishedCell]]:
    """Of each table, what is ranked."""
    tables: dict[tuple[str, str], list[PublishedCell]] = defaultdict(list)
    for row in rows:
        if not row.bound and not row.given:
            tables[row.paper, row.table].append(row)
    return list(tables.values())


def cell(published: float, predicted: float, **changes: Any) -> PublishedCell:
    return PublishedCell("p", "t", "c", published, predicted, "x", THROUGHPUT, **changes)


def test_numbers_that_hardly_differ_have_no_order() -> None:
    rising = [cell(1.0, 5.0), cell(2.0, 6.0), cell(3.0, 7.0)]
    assert rank_correlation(rising) == pytest.approx(1.0)
    assert rank_correlation([cell(row.published, -row.predicted) for row in rising]) == pytest.approx(-1.0)
    assert rank_correlation([cell(1.0, 1.8717), cell(1.2, 1.8718), cell(1.4, 1.8718)]) == 0
    assert rank_correlation([cell(1.0, 2.0), cell(1.01, 1.0)]) is None
    assert rank_correlation([cell(1.0, 2.0)]) is None
    assert rank_correlation([cell(1.0, 2.0, bound=True)]) is None


def test_no_cell_is_far_off_without_a_sentence_that_says_why(rows: list[PublishedCell]) -> None:
    assert not [row for row in rows if abs(row.deviation) > FAR_OFF and not row.why]


def test_medians_are_within_what_the_model_promises(rows: list[PublishedCell]) -> None:
    assert median_deviation(rows, THROUGHPUT) <= 0.15
    assert median_deviation(rows, DERIVED) <= 0.05


def test_at_most_four_named_factors_and_all_are_listed(rows: list[PublishedCell]) -> None:
    listed = factors()
    assert len(listed) <= 4
    assert all(factor.meaning for factor in listed)
    content = document(rows)
    assert content["efficiency_factors"] == [
        {"name": factor.name, "value": factor.value, "meaning": factor.meaning} for factor in listed
    ]


def test_a_factor_moves_predictions_but_no_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    half = Efficiency(EFFICIENCY.arithmetic / 2, EFFICIENCY.card_memory / 2)
    usual = [*moe_lightning.rows()]
    monkeypatch.setattr(moe_lightning, "Costs", partial(Costs, efficiency=half))
    for normal, slow in zip(usual, moe_lightning.rows(), strict=True):
        if normal.kind == DERIVED:
            assert slow.predicted == normal.predicted
        elif normal.unit == "tokens/s":
            assert slow.predicted <= normal.predicted


def test_popularity_has_the_published_quantiles() -> None:
    values = fiddler.published_popularity()
    assert len(values) == 256
    assert values == sorted(values)
    assert (values[0], values[-1]) == (pytest.approx(0.22), pytest.approx(1.0))
    assert sum(values) / 256 == pytest.approx(0.71, abs=0.01)
    assert sum(value < 0.6 for value in values) == 15
    assert sum(value > 0.8 for value in values) in (26, 27)
