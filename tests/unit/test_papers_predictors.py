"""Two papers' predictors on recorded routing, and on routing that is made up."""

import numpy as np
import pytest

from engine.bench.predictors import answers, network_rows, recorded_trace, table_rows
from engine.experts.replay import RoutingTrace
from engine.planner.papers import FAR_OFF, REPLAYED
from engine.planner.papers.report import in_order, rank_correlation


def made_up(tokens: int, *, follows: bool) -> RoutingTrace:
    """Four layers, of eight experts two: each the neighbours of those of the layer before, or any."""
    random = np.random.default_rng(3)
    first = random.permuted(np.tile(np.arange(8), (tokens, 1)), axis=1)[:, :2]
    layers = [first]
    for _ in range(3):
        after = (layers[-1] + 1) % 8
        layers.append(after if follows else random.permuted(np.tile(np.arange(8), (tokens, 1)), axis=1)[:, :2])
    chosen = np.stack(layers, axis=1).astype(np.int16)
    starts = np.linspace(0, tokens, 17).astype(np.int64)
    return RoutingTrace(chosen, np.zeros(chosen.shape, np.float16), starts, 8)


def test_what_is_packaged_is_whole_answers() -> None:
    trace = recorded_trace()
    assert (trace.layers, trace.num_experts, trace.per_token) == (24, 32, 4)
    assert len(trace.sequence_starts) == 18
    assert answers(trace, 0, 8).tokens + answers(trace, 8).tokens == trace.tokens


def test_a_table_on_recorded_routing_is_near_what_its_paper_says() -> None:
    rows = list(table_rows(recorded_trace()))
    assert rank_correlation(rows) == pytest.approx(1.0)
    assert all(row.kind == REPLAYED and row.note for row in rows)
    assert all(abs(row.deviation) < FAR_OFF for row in rows)
    assert in_order(rows) == rows


@pytest.mark.parametrize("follows", [True, False])
def test_a_table_finds_who_follows_whom_and_nothing_else(follows: bool) -> None:
    alone = {row.cell: row.predicted for row in table_rows(made_up(640, follows=follows))}[
        "right for one sequence alone"
    ]
    assert alone == pytest.approx(100) if follows else alone < 40


def test_a_network_finds_who_follows_whom() -> None:
    found = {row.cell: row for row in network_rows(made_up(1280, follows=True), widths=(64, 32), epochs=15)}
    assert found["at least one right"].predicted > 80
    assert found["all right"].why


@pytest.mark.exhaustive
def test_a_network_on_recorded_routing_is_near_what_its_paper_says() -> None:
    found = {row.cell: row for row in network_rows(recorded_trace())}
    assert abs(found["at least one right"].deviation) < 0.1
    assert found["all right"].why
