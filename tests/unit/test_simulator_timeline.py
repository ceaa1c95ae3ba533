"""A timeline's invariants: a resource does one thing at a time, in the order of issue, never before it may."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.simulator.sweeps import LANES, Span, Timeline

_LANES = [lane for lane in LANES if lane != "phase"]
_WORK = st.lists(
    st.tuples(st.sampled_from(_LANES), st.floats(0, 10), st.lists(st.integers(0, 30), max_size=3)), max_size=40
)


def resource(span: Span) -> str:
    return "cpu" if span.lane in ("cpu_experts", "cpu_attention") else span.lane


@given(work=_WORK)
def test_a_resource_does_one_thing_at_a_time_and_waits_for_what_it_needs(
    work: list[tuple[str, float, list[int]]],
) -> None:
    timeline = Timeline()
    ends: list[float] = []
    for lane, seconds, needs in work:
        after = max((ends[need] for need in needs if need < len(ends)), default=0.0)
        ends.append(timeline.run(lane, seconds, "work", after))
        assert ends[-1] >= after
    by_resource: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        assert span.start >= span.ready
        by_resource[resource(span)].append(span)
    for spans in by_resource.values():
        for earlier, later in itertools.pairwise(spans):
            assert later.start >= earlier.end
            # Nothing idles: whoever may begin does.
            assert later.start == max(earlier.end, later.ready)
    assert timeline.end == max((span.end for span in timeline.spans), default=0.0)
    assert sum(timeline.busy_s(lane) for lane in LANES) == pytest.approx(sum(seconds for _, seconds, _ in work))


@given(work=_WORK, factor=st.floats(0.1, 1.0))
def test_faster_work_ends_no_later(work: list[tuple[str, float, list[int]]], factor: float) -> None:
    def last(scale: float) -> float:
        timeline = Timeline(record=False)
        ends: list[float] = []
        for lane, seconds, needs in work:
            after = max((ends[need] for need in needs if need < len(ends)), default=0.0)
            ends.append(timeline.run(lane, seconds * scale, "work", after))
        return timeline.end

    assert last(factor) <= last(1.0) * (1 + 1e-9)
