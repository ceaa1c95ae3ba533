"""Seconds of a step and decode speed by expert slots: what they may never do, whatever the machine."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.step_table import drafts_lines, lines
from engine.checkpoint.model_shape import ModelShape, model_names, read_model
from engine.common.config import EngineConfig, Misses
from engine.hardware.machine import (
    CallProfile,
    CpuProfile,
    GpuProfile,
    HardwareProfile,
    LinkProfile,
    Origin,
    machine_names,
    read_machine,
)
from engine.planner.costs import GRAPH_OPERATOR_S, STEP_LAUNCHES, engine_costs
from engine.planner.engine_memory import memory_rule
from engine.planner.plan_parts import Limits, Workload
from engine.planner.predict import DecodePrediction, predict_decode, tokens_per_s_with
from engine.planner.simulator.requests import Setting, run_requests
from engine.planner.simulator.strategy import Miss, Residency, Strategy
from engine.planner.step_time import StepTime, costs_of_step, ways_of_step

_CARDS = [name for name in machine_names() if read_machine(name).gpu is not None]


def a_step(machine: str = "desktop-rtx-4090-24gb", model: str = "qwen3-30b-a3b") -> StepTime:
    return StepTime(engine_costs(read_machine(machine), read_model(model), "int4"))


@given(
    machine=st.sampled_from(_CARDS),
    model=st.sampled_from(model_names()),
    misses=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    disk_share=st.floats(0, 1),
)
def test_whatever_is_farther_away_takes_longer(
    machine: str, model: str, misses: list[float], disk_share: float
) -> None:
    captured = a_step(machine, model)
    dispatched = replace(
        captured, costs=engine_costs(captured.costs.machine, captured.costs.model, "int4", captures=False)
    )
    layers = captured.costs.model.moe_layers
    few, many = sorted(misses)
    for step in (captured, dispatched):
        # The CPU computes misses beside the card's hits, so few of them may gain a little.
        assert 0 < step.seconds(few) <= step.seconds(1.0) * (1 + 1e-9)
        assert step.seconds(0.0, whole_layers=layers) <= step.seconds(0.0)
    of_disk = replace(dispatched, disk_share=disk_share)
    assert dispatched.seconds(many) <= of_disk.seconds(many) * (1 + 1e-9)
    for way in ("cpu", "fetch"):
        assert of_disk.seconds(many) <= replace(of_disk, way=way).seconds(many) * (1 + 1e-9)


def test_a_hand_over_is_paid_in_each_layer_that_has_one_and_flags_where_an_expert_misses() -> None:
    step = replace(a_step(), way="cpu")  # else the engine would take the dispatcher
    layers, steps = step.costs.model.moe_layers, step.costs.steps
    assert steps is not None
    assert steps.exchange is not None

    def later_by(miss_ratio: float, whole_layers: int = 0, **more: float) -> float:
        exchange = replace(steps.exchange, **{name: getattr(steps.exchange, name) + s for name, s in more.items()})
        slow = replace(step, costs=replace(step.costs, steps=replace(steps, exchange=exchange)))
        return slow.seconds(miss_ratio, whole_layers=whole_layers) - step.seconds(miss_ratio, whole_layers=whole_layers)

    for miss_ratio in (0.0, 0.5, 1.0):
        assert later_by(miss_ratio, layer_s=1e-3) == pytest.approx(layers * 1e-3)
    assert later_by(0.5, 8, layer_s=1e-3) == pytest.approx((layers - 8) * 1e-3)
    assert later_by(0.5, layers, layer_s=1e-3) == pytest.approx(0, abs=1e-9)
    assert later_by(1.0, host_s=1e-3) == pytest.approx(layers * 1e-3)
    assert later_by(0.0, host_s=1e-3) == pytest.approx(0, abs=1e-9)


_ONE_CARD, _TWO, _AMD = "desktop-rtx-3090-24gb", "desktop-2x-rtx-3090", "desktop-rx-7900-xtx-24gb"


@pytest.mark.parametrize(
    ("machine", "asked", "asks"),
    [
        (_ONE_CARD, {}, True),
        (_ONE_CARD, {"misses": "cpu"}, True),
        (_ONE_CARD, {"misses": "fetch"}, False),
        (_ONE_CARD, {"disk_share": 0.1}, False),
        (_ONE_CARD, {"rows": 2}, False),
        (_TWO, {}, False),
        (_AMD, {}, False),
    ],
)
def test_a_step_that_misses_is_one_graph_where_the_card_can_ask(
    machine: str, asked: dict[str, Any], asks: bool
) -> None:
    costs = engine_costs(read_machine(machine), read_model("qwen3-30b-a3b"), "int4")
    step = costs_of_step(costs, **{"misses": "mixed", **asked})
    assert step.dispatch.by_flags is asks
    assert (step.efficiency.operator_s == GRAPH_OPERATOR_S) is asks
    assert (step.launches.layer, step.launches.experts) == (STEP_LAUNCHES.layer, STEP_LAUNCHES.experts)
    without = engine_costs(costs.machine, costs.model, "int4", captures=False)
    assert not costs_of_step(without, "mixed").dispatch.by_flags


@given(machine=st.sampled_from(_CARDS), model=st.sampled_from(model_names()), misses=st.floats(0, 1))
def test_the_engine_takes_the_sooner_of_both_ways(machine: str, model: str, misses: float) -> None:
    step = a_step(machine, model)
    ways = ways_of_step(step.costs, "mixed")
    assert [way.dispatch.by_flags for way in ways] in ([False], [False, True])
    each = [replace(step, costs=way).seconds(misses) for way in ways]
    assert step.seconds(misses) == min(each)


def test_drafts_cost_less_than_tokens_but_not_nothing() -> None:
    one = a_step()
    two = replace(one, rows=2.0, new_experts=0.6)
    assert two.used == 13
    assert two.drafts_s > 0
    assert one.seconds(0.5) < two.seconds(0.5) < 2 * one.seconds(0.5)
    assert one.drafts_s == replace(two, on_card=False).drafts_s == 0


def test_the_page_has_these_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "step-time.md").read_text(encoding="utf-8")
    assert "\n".join(lines()) in page
    assert "\n".join(drafts_lines()) in page


_WAYS: dict[Misses, Miss] = {"mixed": Miss.MIXED, "cpu": Miss.CPU, "fetch": Miss.FETCH}


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("misses", _WAYS)
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite"])
@pytest.mark.parametrize("machine", ["desktop-rtx-3080-10gb", "laptop-rtx-4050-6gb", "klotski-h800"])
def test_as_the_simulator(machine: str, model: str, misses: Misses) -> None:
    profile, shape = read_machine(machine), read_model(model)
    costs = engine_costs(profile, shape, "int4")
    rule = memory_rule(costs, Limits())
    strategy = Strategy("simulated", Residency.STATIC, _WAYS[misses], grouped=True)
    config = EngineConfig("m", precision="int4", misses=misses)
    every = shape.moe_layers * shape.experts
    for slots in (0, every // 4, every // 2, every):
        played = run_requests(strategy, Setting(costs, Workload("d", 128, 256), slots=slots, rule=rule))
        assert played.hit_rate is not None
        rate = tokens_per_s_with(profile, shape, config, slots, 1 - played.hit_rate)
        assert rate == pytest.approx(played.decode_tokens_per_s, rel=0.15)


@given(
    machine=st.sampled_from(machine_names()),
    model=st.sampled_from(model_names()),
    misses=st.sampled_from(["mixed", "cpu", "fetch", "off", "layer"]),
    ratios=st.lists(st.floats(0, 1), min_size=2, max_size=6),
    device=st.sampled_from(["auto", "cpu"]),
)
def test_fewer_misses_are_never_slower_where_they_are_waited_for(
    machine: str, model: str, misses: Misses, ratios: list[float], device: str
) -> None:
    profile, shape = read_machine(machine), read_model(model)
    config = EngineConfig("m", device=device, precision="int4", misses=misses)
    rates = [tokens_per_s_with(profile, shape, config, *each) for each in enumerate(sorted(ratios, reverse=True))]
    assert all(rate > 0 for rate in rates)
    if device == "auto" and misses in ("mixed", "cpu"):
        return  # a slow card with a fast processor beside it gains by a miss: both work at once
    assert all(later >= 0.999 * earlier for earlier, later in itertools.pairwise(rates))


def test_what_is_no_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        tokens_per_s_with(
            read_machine("gcp-l4"), read_model("mixtral-8x7b"), EngineConfig("m", precision="int8"), 3, 1.5
        )


CPU = CpuProfile("two cores", 2, 8e11, 40e9, 24 * 2**30, {1: 32e9, 2: 37e9})
TIMED = HardwareProfile(
    "here",
    "",
    "measured",
    None,
    LinkProfile(2e9, 2e9, 2e9),
    CPU,
    1e9,
    origins={"cpu.ram_bytes_per_s": Origin.MEASURED, "cpu.flops": Origin.MEASURED},
    calls=CallProfile(4e-6, 3e-5, 1.3e-4, 4e-5, 2e-4, 4e-5, 1.7e-5),
)
LARGE = read_model("qwen3-30b-a3b")


def tiny() -> ModelShape:
    """Next to no weights: calls are all that counts."""
    attention = replace(LARGE.attention, heads=2, kv_heads=1, head_dim=16)
    return replace(
        LARGE,
        layers=8,
        full_attention_layers=8,
        hidden=64,
        vocabulary=512,
        experts=16,
        experts_per_token=4,
        expert_width=32,
        attention=attention,
    )


def predicted(machine: HardwareProfile, model: ModelShape = LARGE, limits: Limits | None = None) -> DecodePrediction:
    return predict_decode(machine, model, EngineConfig("m", device="cpu", precision="int4", threads=2), limits=limits)


def width(found: DecodePrediction) -> tuple[float, float]:
    return found.low / found.tokens_per_s, found.high / found.tokens_per_s


@pytest.mark.parametrize("model", [LARGE, tiny()], ids=["large", "tiny"])
@pytest.mark.parametrize("cache_bytes", [0, 2**25, 2**40])
@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_on_a_measured_cpu_it_is_narrow_enough_to_be_of_use(model: ModelShape, cache_bytes: int, spread: float) -> None:
    machine = replace(TIMED, cpu=replace(CPU, cache_bytes=cache_bytes), spread=spread)
    low, high = width(predicted(machine, model))
    assert 0.6 <= low < 0.9
    assert 1.1 < high <= 1.6


def test_what_changed_while_it_was_measured_is_trusted_less() -> None:
    steady, unsteady = width(predicted(TIMED)), width(predicted(replace(TIMED, spread=0.3)))
    assert unsteady[0] < steady[0]
    assert unsteady[1] > steady[1]


def test_other_programs_lower_the_slow_end_alone() -> None:
    alone, beside = predicted(TIMED), predicted(TIMED, limits=Limits(use_card=False, cpu_of_others=0.5))
    assert (alone.tokens_per_s, alone.high) == (beside.tokens_per_s, beside.high)
    assert beside.low == pytest.approx(alone.low / 2, rel=0.1)


def test_data_sheets_are_trusted_least() -> None:
    known = width(predicted(TIMED))
    assumed = width(predicted(replace(TIMED, origins={}, calls=CallProfile())))
    assert assumed[0] < known[0]
    assert assumed[1] > known[1]


def test_timed_calls_rule_a_small_model_and_hardly_a_large_one() -> None:
    slower = replace(TIMED, calls=replace(TIMED.calls, native_s=8e-6))
    assert predicted(slower, tiny()).tokens_per_s < 0.6 * predicted(TIMED, tiny()).tokens_per_s
    assert predicted(slower).tokens_per_s > 0.9 * predicted(TIMED).tokens_per_s


def test_with_all_experts_an_emulated_card_is_as_fast_as_the_cpu_that_computes_for_it() -> None:
    card = GpuProfile("emulated:slow-link", 4 * 2**30, 8e11, 40e9)
    found = predict_decode(
        replace(TIMED, gpu=card), tiny(), EngineConfig("m", device="emulated:slow-link", precision="bf16", threads=1)
    )
    on_cpu = predict_decode(TIMED, tiny(), EngineConfig("m", device="cpu", precision="bf16", threads=1))
    assert found.memory.all_experts
    assert found.tokens_per_s == pytest.approx(on_cpu.tokens_per_s, rel=0.1)


@given(machine=st.sampled_from(machine_names()), model=st.sampled_from(model_names()), misses=st.floats(0, 1))
def test_reading_ahead_never_hurts_a_processor(machine: str, model: str, misses: float) -> None:
    step = replace(a_step(machine, model), on_card=False, disk_share=1.0)
    assert replace(step, reads_ahead=True).seconds(misses) <= step.seconds(misses) * (1 + 1e-9)
