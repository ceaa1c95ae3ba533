"""What a timeline says, and the one change that would help most."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.model_shape import read_model
from engine.common.config import EngineConfig
from engine.hardware.machine import read_machine
from engine.planner.simulator.sweeps import LANES
from engine.protocol import CacheReport, TierReport
from engine.telemetry.analysis import (
    OTHER,
    Waiting,
    critical_path,
    joules_per_token,
    lane_seconds,
    range_averages,
    token_ticks,
    utilisation,
    waiting,
)
from engine.telemetry.lanes import CPU_EXPERTS, GPU, H2D, PHASE, POST_FETCH
from engine.telemetry.records import Records, no_spans
from engine.tuning.advice import Advice, PlannedSpeed, Running, advise, predicted_rate
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


def report(slots: int, **fields: float) -> CacheReport:
    tier = TierReport("vram", slots, 100, 1000, 0, 0, 0.5, "lru", False, (), 0, 0, 0, 0, 0)
    curve = tuple(range(0, 101, 10)), tuple(number / 10 for number in range(11))
    values = {"steps_per_s": 10.0, "lookups_per_step": 10.0, "hit_s": 0.001, "miss_s": 0.009, **fields}
    return CacheReport(
        (tier,),
        *curve,
        values["steps_per_s"],
        values["lookups_per_step"],
        values["hit_s"],
        values["miss_s"],
        "",
        0,
        (),
        (),
    )


def test_a_bigger_cache_is_predicted_to_be_faster() -> None:
    rates = predicted_rate(report(50), [0, 50, 100])
    assert rates == sorted(rates)
    assert rates[1] == pytest.approx(10)
    assert rates[2] == pytest.approx(1 / 0.06)
    assert predicted_rate(report(50, miss_s=0.0), [1]) == []


def test_the_advice_follows_what_is_waited_for() -> None:
    cpu = waiting(np.array([span(CPU_EXPERTS, 0, 95)]), steps((0, 100)))
    assert advise(cpu, None, Running("int4", 2, 8)).change == "threads"
    assert advise(cpu, None, Running("bf16", 8, 8)).value == "int8"
    assert advise(cpu, report(50), Running("int4", 8, 8, free_vram_bytes=10**6)).change == "cache_slots"
    idle = waiting(no_spans(), steps((0, 100)))
    assert advise(idle, None, Running("bf16", 1, 8)).change == "none"


def planned(machine: str = "desktop-rtx-3080-10gb", model: str = "qwen3-30b-a3b", **config: Any) -> PlannedSpeed:
    options: dict[str, Any] = {"precision": "int8", "threads": 4, "misses": "cpu", **config}
    return PlannedSpeed(read_machine(machine), read_model(model), EngineConfig("m", **options))


def waited(**share: float) -> Waiting:
    return Waiting(100, 1.0, {**share, OTHER: 1 - sum(share.values())})


def test_the_planner_overrules_the_rules() -> None:
    plan = planned()
    most = replace_tier(report(50), most_slots=plan.model.moe_layers * plan.model.experts)
    running = Running("int4", 4, 4, free_vram_bytes=10**9)
    found = advise(waited(cpu_experts=0.9), most, running, plan)
    assert found.change == "cache_slots"
    # The curve says that all that missed will hit.
    assert found.gain == pytest.approx(plan.gain((50, 0.5), (int(found.value), 0.0)))


def test_other_programs_are_the_first_cause() -> None:
    running = Running("bf16", 2, 8)
    assert advise(waited(cpu_experts=0.9), None, running).change == "threads"
    busy = replace(waited(cpu_experts=0.9), others=0.94)
    assert advise(busy, None, running) == Advice("other_programs")
    assert advise(replace(busy, others=0.02), None, running).change == "threads"


def test_no_change_gains_more_than_the_time_it_touches() -> None:
    plan = planned(threads=1)
    assert plan.gain((0, 1.0), (0, 1.0), threads=8) is None  # nobody has measured how threads share this memory
    cpu = replace(plan.machine.cpu, weights_bytes_per_s={1: 1e10, 8: 6e10})
    plan = replace(plan, machine=replace(plan.machine, cpu=cpu))
    predicted = plan.gain((0, 1.0), (0, 1.0), threads=8)
    assert predicted is not None
    assert predicted > 1.2
    found = advise(waited(cpu_experts=0.1), replace_tier(report(0), slots=0), Running("int4", 1, 8), plan)
    assert (found.change, found.gain) == ("threads", pytest.approx(1 / 0.9))


@given(
    st.dictionaries(st.sampled_from(LANES), st.floats(0, 1), max_size=4),
    st.integers(0, 100),
    st.floats(-1, 1),
    st.sampled_from(["fp32", "bf16", "int8", "int4"]),
    st.booleans(),
)
def test_whatever_is_recorded_an_advice_is_worth_its_word(
    parts: Mapping[str, float], slots: int, hit_rate: float, precision: str, with_plan: bool
) -> None:
    total = max(1.0, sum(parts.values()))
    share = {lane: part / total for lane, part in parts.items()}
    seen = replace_tier(report(slots), recent_hit_rate=hit_rate)
    plan = planned(precision=precision) if with_plan else None
    found = advise(waited(**share), seen, Running(precision, 2, 4, free_vram_bytes=10**5), plan)
    assert found.gain >= 1.05 or found.change == "none"


def replace_tier(whole: CacheReport, **fields: Any) -> CacheReport:
    return replace(whole, tiers=(replace(whole.tiers[0], **fields),))
