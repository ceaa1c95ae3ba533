"""`simulate papers`: every figure is there, the order within each table is right, and what was fitted is little."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest

from engine.planner.costs import EFFICIENCY, Efficiency
from engine.planner.papers import DERIVED, THROUGHPUT, PublishedCell, duoserve, fiddler, moe_lightning
from engine.planner.papers.report import all_rows, document, factors, median_deviation


@pytest.fixture(scope="module")
def rows() -> list[PublishedCell]:
    return all_rows()


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


_NOT_RANKED = ("4: mu", "4: N/mu")
"""What the policy search finds: the throughputs are predicted for the published policies."""


def test_the_rank_order_is_right_in_every_table(rows: list[PublishedCell]) -> None:
    tables: dict[tuple[str, str], list[PublishedCell]] = defaultdict(list)
    for row in rows:
        tables[row.paper, row.table].append(row)
    for (_, table), cells in tables.items():
        assert len({row.unit for row in cells}) == 1
        if table in _NOT_RANKED:
            continue
        ranked = sorted(cells, key=lambda row: row.published)
        for low, high in itertools.pairwise(ranked):
            if low.published < high.published:
                assert low.predicted < high.predicted, f"{table}: {low.cell} / {high.cell}"


def test_medians_are_within_what_the_model_promises(rows: list[PublishedCell]) -> None:
    assert median_deviation(rows, THROUGHPUT) <= 0.20
    assert median_deviation(rows, DERIVED) <= 0.05


def test_medians_do_not_count_what_the_profiles_were_given(rows: list[PublishedCell]) -> None:
    without = [row for row in rows if not row.given]
    assert len(without) < len(rows)
    for kind in (THROUGHPUT, DERIVED):
        assert median_deviation(without, kind) == median_deviation(rows, kind)


def test_at_most_four_named_factors_and_all_are_listed(rows: list[PublishedCell]) -> None:
    listed = factors()
    assert len(listed) <= 4
    assert all(factor.meaning for factor in listed)
    content = document(rows)
    assert content["efficiency_factors"] == [
        {"name": factor.name, "value": factor.value, "meaning": factor.meaning} for factor in listed
    ]


def test_predictions_repeat(rows: list[PublishedCell]) -> None:
    again = [*duoserve.rows(EFFICIENCY), *moe_lightning.rows(EFFICIENCY)]
    assert again == [row for row in rows if row.paper in ("DuoServe-MoE", "MoE-Lightning")]


def test_a_factor_moves_predictions_but_no_dimension() -> None:
    half = Efficiency(EFFICIENCY.arithmetic / 2, EFFICIENCY.card_memory / 2)
    for normal, slow in zip(moe_lightning.rows(EFFICIENCY), moe_lightning.rows(half), strict=True):
        if normal.kind == DERIVED:
            assert slow.predicted == normal.predicted
        elif normal.unit == "tokens/s":
            assert slow.predicted <= normal.predicted


def test_a_bound_that_is_kept_does_not_deviate() -> None:
    row = PublishedCell("p", "t", "c", "%", THROUGHPUT, 1.0, 0.4, bound=True)
    assert row.deviation == 0
    assert PublishedCell("p", "t", "c", "%", THROUGHPUT, 1.0, 1.5, bound=True).deviation == pytest.approx(0.5)
    assert PublishedCell("p", "t", "c", "x", THROUGHPUT, 2.0, 1.5).deviation == pytest.approx(-0.25)


def test_popularity_has_the_published_quantiles() -> None:
    values = fiddler.published_popularity()
    assert len(values) == 256
    assert values == sorted(values)
    assert (values[0], values[-1]) == (pytest.approx(0.22), pytest.approx(1.0))
    assert sum(values) / 256 == pytest.approx(0.71, abs=0.01)
    assert sum(value < 0.6 for value in values) == 15
    assert sum(value > 0.8 for value in values) in (26, 27)
