"""The papers' formulas: rooflines, policy search, Fiddler's and Klotski's decisions, memory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.model_shape import model_names, read_model
from engine.hardware.machine import machine_names, read_machine
from engine.planner.costs import Costs, distinct_experts
from engine.planner.papers.fiddler import hit_rate_bounds
from engine.planner.plan import HierarchicalRoofline, Level
from engine.planner.plan_parts import (
    WORKLOADS,
    Workload,
    parse_workload,
    share_on_disk,
)
from engine.planner.policy_search import BlockTimes, PerformanceModel, fewest_batches, search_policy
from engine.planner.simulator.sweeps import OffloadPolicy

_RATE = st.floats(1e9, 1e15)
_INTENSITY = st.floats(0.01, 1e4)


@st.composite
def rooflines(draw: st.DrawFn) -> HierarchicalRoofline:
    return HierarchicalRoofline(
        Level("GPU", draw(_RATE), draw(_RATE)), Level("CPU", draw(_RATE), draw(_RATE)), draw(_RATE)
    )


@given(roofline=rooflines(), upper=_INTENSITY, lower=_INTENSITY)
def test_turning_points_are_where_the_roofs_meet(roofline: HierarchicalRoofline, upper: float, lower: float) -> None:
    reached = roofline.attainable(upper, lower)
    assert reached <= roofline.upper.attainable(upper)
    second = roofline.second_turning_point(upper)
    assert roofline.link * second == pytest.approx(roofline.upper.attainable(upper))
    if lower >= second:
        assert reached == pytest.approx(roofline.upper.attainable(upper))
    else:
        assert reached == roofline.link * lower
    if lower < roofline.first_turning_point(lower):
        # Left of P1 the host does it itself at least as fast as the card could be fed.
        assert roofline.lower.attainable(lower) > reached * (1 - 1e-9)
    balance = roofline.balance(upper)
    assert roofline.link * balance == pytest.approx(roofline.upper.bytes_per_s * upper)


@given(roofline=rooflines(), upper=_INTENSITY, lower=_INTENSITY)
def test_the_bottleneck_is_the_lowest_roof(roofline: HierarchicalRoofline, upper: float, lower: float) -> None:
    wider = HierarchicalRoofline(roofline.upper, roofline.lower, roofline.link * 2)
    if roofline.bottleneck(upper, lower) != "link":
        assert wider.attainable(upper, lower) == roofline.attainable(upper, lower)
    else:
        assert wider.attainable(upper, lower) >= roofline.attainable(upper, lower)


@pytest.mark.takes_turns(6)
@pytest.mark.parametrize("machine", [name for name in machine_names() if "no-gpu" not in name])
def test_a_searched_policy_keeps_within_memory_and_is_the_best_of_a_sample(machine: str) -> None:
    profile, work = read_machine(machine), Workload("batch", 256, 64, sequences=1000)
    for name in model_names()[::5]:
        costs = Costs(profile, read_model(name))
        found = search_policy(costs, work)
        if found is None:
            continue
        performance, policy = PerformanceModel(costs, work), found.policy
        assert 1 <= policy.micro_batch <= performance.largest_micro_batch(policy.resident)
        assert policy.sequences <= performance.largest_batch(policy.cached)
        kept = performance.kv_bytes() * policy.sequences * policy.cached
        assert kept <= performance.card_room(policy.resident)
        for micro_batch in (1, policy.micro_batch):
            seconds, _ = performance.layer_seconds(OffloadPolicy(micro_batch, micro_batch))
            assert found.tokens_per_s_per_layer >= 0.99 * micro_batch / seconds


@given(popularity=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=64), seed=st.integers(0, 99))
def test_no_static_placement_leaves_the_bounds(popularity: list[float], seed: int) -> None:
    slots = len(popularity) // 2
    bounds = hit_rate_bounds(popularity, slots)
    chosen = random.Random(seed).sample(popularity, slots)
    assert bounds.worst - 1e-9 <= sum(chosen) / sum(popularity) <= bounds.best + 1e-9
    assert bounds.worst - 1e-9 <= bounds.random <= bounds.best + 1e-9


@pytest.mark.parametrize("machine", ["fiddler-quadro-rtx-6000", "desktop-rtx-4090-24gb", "laptop-rtx-3050-4gb"])
@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_algorithm_1_changes_its_mind_once(machine: str, precision: str) -> None:
    costs = Costs(read_machine(machine), read_model("mixtral-8x7b"), precision)
    rows = costs.break_even_rows()
    if rows:
        assert costs.prefers_cpu(rows)
    assert not costs.prefers_cpu(rows + 1)


_SECONDS = st.floats(1e-6, 1.0)


@given(
    st.builds(
        BlockTimes,
        attention=_SECONDS,
        gate=_SECONDS,
        hot=_SECONDS,
        cold=_SECONDS,
        load_attention=_SECONDS,
        load_gate=_SECONDS,
        load_expert=_SECONDS,
        prefetched=st.integers(1, 8),
        queued=st.integers(0, 64),
    )
)
def test_klotski_takes_the_fewest_batches_that_hide_the_loads(times: BlockTimes) -> None:
    batches = fewest_batches(times)
    if batches is None:
        assert not all(times.inequalities(4096))
        return
    assert all(times.inequalities(batches))
    assert batches == 1 or not all(times.inequalities(batches - 1))


@given(ram=st.integers(2**30, 2**42))
def test_what_does_not_fit_into_ram_is_on_disk(ram: int) -> None:
    machine, model = read_machine("desktop-rtx-3090-24gb"), read_model("qwen3-235b-a22b")
    share = share_on_disk(machine.with_memory(ram_bytes=ram), model, "int4")
    assert 0 <= share <= 1
    assert share_on_disk(machine.with_memory(ram_bytes=2 * ram), model, "int4") <= share


@given(experts=st.integers(2, 512), per_token=st.integers(1, 8), tokens=st.floats(0, 1e5))
def test_distinct_experts_are_between_one_token_s_and_all(experts: int, per_token: int, tokens: float) -> None:
    per_token = min(per_token, experts)
    used = distinct_experts(experts, per_token, tokens)
    assert 0 <= used <= experts
    assert distinct_experts(experts, per_token, 1) == pytest.approx(per_token)


def test_workloads_as_text() -> None:
    assert parse_workload("beam") is WORKLOADS["beam"]
    assert parse_workload("512x32x64") == Workload("512x32x64", 512, 32, 64)
    assert parse_workload("8x4x1x2").beams == 2
    for text in ("", "0x4", "4", "4x0", "axb", "4x4x4x4x4"):
        with pytest.raises(ValueError, match="not a workload"):
            parse_workload(text)
