"""What a timeline says, against a slow and plain count of nanoseconds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.simulator.sweeps import LANES
from engine.telemetry.analysis import (
    OTHER,
    critical_path,
    joules_per_token,
    lane_seconds,
    range_averages,
    token_ticks,
    utilisation,
    waiting,
)
from engine.telemetry.lanes import CPU_EXPERTS, GPU, H2D, PHASE, POST_FETCH
from engine.telemetry.records import Records
from tests.unit.recorded import span, spans, steps

RANGES = st.tuples(st.integers(0, 9000), st.integers(1, 4000)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def covered(records: Records, lane: int, start: int, end: int) -> np.ndarray:
    """Of each nanosecond of [start, end), whether a lane is busy in it."""
    busy = np.zeros(end - start, bool)
    for record in records[records["lane"] == lane]:
        busy[max(0, int(record["start_ns"]) - start) : max(0, int(record["end_ns"]) - start)] = True
    return busy


@given(spans(), st.sampled_from(range(len(LANES))), RANGES, st.integers(1, 12))
def test_utilisation_is_the_share_of_busy_time(
    records: Records, lane: int, period: tuple[int, int], buckets: int
) -> None:
    start, end = period[0], period[0] + (period[1] - period[0]) * buckets  # whole nanoseconds
    busy = covered(records, lane, start, end).reshape(buckets, -1).mean(axis=1)
    np.testing.assert_allclose(utilisation(records, lane, start, end, buckets), busy, atol=1e-9)


@given(spans(), RANGES)
def test_lane_seconds_count_each_moment_once(records: Records, period: tuple[int, int]) -> None:
    seconds = lane_seconds(records, *period)
    for lane, name in enumerate(LANES):
        expected = covered(records, lane, *period).sum() / 1e9 if lane != PHASE else 0.0
        assert seconds.get(name, 0.0) == pytest.approx(expected)


@given(spans(), RANGES)
def test_a_critical_path_has_no_gaps_and_only_what_was_done_then(records: Records, period: tuple[int, int]) -> None:
    pieces = critical_path(records, *period)
    assert [piece.start_ns for piece in pieces] == [period[0], *(piece.end_ns for piece in pieces[:-1])]
    assert pieces[-1].end_ns == period[1]
    for piece in pieces:
        assert piece.start_ns <= piece.end_ns
        if piece.span >= 0:
            assert records["start_ns"][piece.span] <= piece.start_ns
            assert piece.end_ns <= records["end_ns"][piece.span]


def test_a_step_waits_for_whoever_ends_last() -> None:
    records = np.array(
        [
            span(GPU, 0, 40),
            span(CPU_EXPERTS, 10, 70),  # ends after the device: waited for
            span(H2D, 10, 95, POST_FETCH),  # for later: by nobody
            span(GPU, 75, 90),
        ]
    )
    result = waiting(records, steps((0, 100)))
    assert result.share == pytest.approx({"cpu_experts": 0.6, "other": 0.15, "gpu": 0.25})
    assert result.most == "cpu_experts"


@given(spans(), st.lists(st.integers(1, 900), min_size=1, max_size=8))
def test_shares_of_waiting_add_up_whatever_was_recorded(records: Records, lengths: list[int]) -> None:
    ends = np.cumsum(lengths).tolist()
    result = waiting(records, steps(*zip([0, *ends[:-1]], ends, strict=True)))
    assert sum(result.share.values()) == pytest.approx(1)
    assert result.seconds == pytest.approx(ends[-1] / 1e9)
    assert set(result.share) <= {*LANES, OTHER}


def test_averages_of_a_range() -> None:
    records = np.array([span(H2D, 0, 50, nbytes=100), span(H2D, 25, 75, nbytes=50)])
    averages = range_averages(records, steps((0, 50), (50, 100), hits=3), 0, 100)
    assert averages.tokens == 2
    assert averages.tokens_per_s == pytest.approx(2e7)
    assert averages.per_token["hits"] == 3
    assert averages.busy == pytest.approx({"h2d": 0.75})
    assert averages.gigabytes_per_s == pytest.approx({"h2d": 2.0})
    assert token_ticks(steps((0, 50), (50, 100))).tolist() == [50, 100]


def test_energy_is_power_over_the_time_of_the_steps() -> None:
    moments = [0, 10**9, 2 * 10**9]
    token = steps((500_000_000, 1_500_000_000))
    assert joules_per_token(moments, [100.0, 100.0, 100.0], token) == pytest.approx(100)
    assert joules_per_token(moments, [0.0, 100.0, 0.0], token) == pytest.approx(75)
    assert joules_per_token(moments, [None, None, None], token) is None
    assert joules_per_token(moments[:2], [50.0, 50.0], token) is None
