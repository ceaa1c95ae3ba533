"""Which experts a sweep is going to want most, and how busy a link was."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedules import busy_share
from engine.devices.device import CopyRecord
from engine.experts.prediction.predictors import BatchCorrelation


def test_experts_that_follow_those_of_most_tokens_are_hot() -> None:
    # In the next layer expert e + 1 follows expert e.
    table, draw = BatchCorrelation(2, 8), np.random.default_rng(0)
    for _ in range(20):
        first = draw.integers(0, 8, (30, 1))
        table.observe(0, first)
        table.observe(1, (first + 1) % 8)
    table.observe(0, np.array([[3]] * 9 + [[5]] * 4 + [[0]]))
    assert table.hot(1, 3) == [4, 6, 1]


def test_ids_beyond_the_experts_and_sweeps_of_other_sizes_count_nothing() -> None:
    table = BatchCorrelation(2, 4)
    table.observe(0, np.array([[4, 9]]))
    table.observe(1, np.array([[1, 2]]))
    table.observe(0, np.array([[0, 1]] * 2))
    table.observe(1, np.array([[0, 1]]))
    assert not table._pairs.any()
    assert table.hot(1, 2) == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_copies_that_overlap_count_once(spans: list[tuple[int, int]]) -> None:
    copies = [CopyRecord("h2d", "h2d", 1, float(begin), float(begin + length)) for begin, length in spans]
    busy = {second for begin, length in spans for second in range(begin, begin + length)}
    assert busy_share(copies, 0.0, 80.0) == pytest.approx(len(busy) / 80)
