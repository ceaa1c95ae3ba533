"""The past in bounded memory: what goes in comes out again, at every resolution, however it was cut up."""

import numpy as np
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from app.services.history.gauges import BUCKET_NS, HOLD_NS, BucketSeries, GaugeHistory, spread
from app.services.history.history import BusyTime, ClockAlignment, History, RecordHistory
from engine.telemetry.lanes import CPU_ATTENTION, CPU_EXPERTS, H2D
from engine.telemetry.records import SPAN, no_spans
from tests.app.recorded import STEP_NS, decoded

ORIGIN_NS = 10**15
intervals = st.lists(
    st.tuples(st.integers(0, 400 * BUCKET_NS), st.integers(0, 30 * BUCKET_NS)), min_size=1, max_size=40
)


def covered(pairs: list[tuple[int, int]]) -> int:
    """Nanoseconds that at least one interval covers, the slow way."""
    total, until = 0, -1
    for start, end in sorted(pairs):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


@given(intervals, st.integers(1, 300))
@example_settings(max_examples=60)
def test_amounts_are_neither_lost_nor_made(pairs: list[tuple[int, int]], columns: int) -> None:
    starts = np.array([ORIGIN_NS + start for start, _ in pairs])
    ends = starts + np.array([length for _, length in pairs])
    amounts = np.arange(1.0, len(pairs) + 1)
    series = BucketSeries()
    series.add(*spread(starts, ends, amounts))
    edges = np.linspace(ORIGIN_NS - BUCKET_NS, ORIGIN_NS + 500 * BUCKET_NS, columns + 1)
    assert_allclose(series.read(edges).sum(), amounts.sum(), rtol=1e-4)


@given(intervals, st.data())
@example_settings(max_examples=60)
def test_busy_time_does_not_depend_on_how_spans_are_cut_into_messages(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(pairs))
    cut = data.draw(st.integers(0, len(pairs)))
    busy = BusyTime()
    for part in (order[:cut], order[cut:]):
        starts = np.array([ORIGIN_NS + start for start, _ in part], np.int64)
        busy.add(starts, starts + np.array([length for _, length in part], np.int64))
    edges = np.array([ORIGIN_NS - BUCKET_NS, ORIGIN_NS + 500 * BUCKET_NS], np.float64)
    expected = covered([(start, start + length) for start, length in pairs])
    assert abs(float(busy.series.read(edges)[0]) - expected) <= 1e-4 * expected + 3 * len(pairs)


@given(st.integers(1, 12), st.integers(10, 2000))
@example_settings(max_examples=30)
def test_what_is_too_old_for_a_level_is_read_from_a_coarser_one(hours: int, columns: int) -> None:
    series = BucketSeries()
    first = ORIGIN_NS // BUCKET_NS
    series.add(first, np.full(1000, 7.0))
    series.add(first + hours * 3_600_000, np.full(1000, 1.0))
    edges = np.linspace(ORIGIN_NS - 10e9, ORIGIN_NS + 20e9, columns + 1)
    assert_allclose(series.read(edges).sum(), 7000.0, rtol=1e-3)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 60))
def test_records_are_bounded_and_the_newest_stay(sizes: list[int], most: int) -> None:
    history = RecordHistory(most, no_spans())
    count = 0
    for size in sizes:
        piece = np.zeros(size, SPAN)
        piece["start_ns"] = count + np.arange(size)
        piece["end_ns"] = piece["start_ns"] + 1
        history.add(piece)
        count += size
    assert len(history) <= most + max(sizes)
    wanted = min(most, sizes[-1])
    assert history.last(wanted)["start_ns"].tolist() == list(range(count - wanted, count))
    assert history.between(count - 1, count + 5)["start_ns"].tolist() == [count - 1]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.one_of(st.none(), st.floats(0, 1))), max_size=60))
def test_gauges_hold_until_the_next_sample_and_no_longer(steps: list[tuple[int, float | None]]) -> None:
    gauges = GaugeHistory(capacity=16)
    at, last = ORIGIN_NS, None
    for wait, value in steps:
        at += wait
        gauges.add(at, {"cpu_all": value})
        last = (at, value) if last is None or at > last[0] else last
    assert len(gauges) <= 16
    later = np.array([at + HOLD_NS + 1, at + HOLD_NS + 2], np.float64)
    assert np.isnan(gauges.read("cpu_all", later)).all()
    if last is not None and last[1] is not None:
        now = gauges.read("cpu_all", np.array([last[0] + 1, last[0] + 2], np.float64))
        assert_allclose(now, [last[1]], rtol=1e-6, atol=1e-30)


def test_a_decode_without_gaps_reads_as_its_own_rate() -> None:
    history = History()
    spans, steps = decoded(200, ORIGIN_NS)
    history.add_spans(spans)
    history.add_steps(steps)
    edges = np.linspace(ORIGIN_NS, ORIGIN_NS + 200 * STEP_NS, 101)
    assert_allclose(history.tokens_per_s(edges), 1e9 / STEP_NS, rtol=1e-3)
    both = history.busy(CPU_ATTENTION, edges) + history.busy(CPU_EXPERTS, edges)
    assert_allclose(both, 1.0, atol=0.03)
    assert_allclose(history.experts(edges)[2], 1.0)
    (run,) = history.runs_between(ORIGIN_NS, ORIGIN_NS + 10**9)
    assert run.tokens == 200


def test_bytes_add_up_to_what_was_copied() -> None:
    history = History()
    spans, _ = decoded(50, ORIGIN_NS, on_device=True)
    history.add_spans(spans)
    edges = np.linspace(ORIGIN_NS - 10**9, ORIGIN_NS + 60 * STEP_NS, 333)
    moved = (history.bytes_per_s(H2D, edges) * np.diff(edges) / 1e9).sum()
    assert_allclose(moved, spans["nbytes"].sum(), rtol=1e-4)
    assert history.has_copies


# --- clocks ---------------------------------------------------------------------------------------


@given(st.integers(-(10**17), 10**17))
def test_a_clock_of_its_own_is_moved_to_ours(offset: int) -> None:
    clock = ClockAlignment()
    theirs = 2 * 10**17
    now = theirs + offset
    clock.observe(theirs, now)
    spans, _ = decoded(3, theirs - 10**9)
    moved = clock.aligned(spans, now)
    assert len(moved) == len(spans)
    assert now - 11 * 10**9 <= int(moved["start_ns"].min()) <= now


@given(st.integers(-(2**62), 2**62), st.integers(-(2**62), 2**62))
def test_spans_that_cannot_be_are_left_out(start: int, end: int) -> None:
    spans = np.zeros(1, SPAN)
    spans["start_ns"], spans["end_ns"] = start, end
    kept = ClockAlignment().aligned(spans, ORIGIN_NS)
    if len(kept):
        assert 0 <= start <= end <= ORIGIN_NS + 10**9
    history = History()
    history.add_spans(kept)
