"""Decode speed by expert slots: as the simulator has it step by step, and never slower with fewer misses."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.model_shape import model_names, read_model
from engine.common.config import EngineConfig, Misses
from engine.hardware.machine import machine_names, read_machine
from engine.planner.costs import engine_costs
from engine.planner.engine_memory import memory_rule
from engine.planner.plan_parts import Limits, Workload
from engine.planner.predict import tokens_per_s_by_slots
from engine.planner.simulator.requests import Setting, run_requests
from engine.planner.simulator.strategy import Miss, Residency, Strategy

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
        assert played is not None
        assert played.hit_rate is not None
        ((same, rate),) = tokens_per_s_by_slots(profile, shape, config, [(slots, 1 - played.hit_rate)])
        assert same == slots
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
    curve = list(enumerate(sorted(ratios, reverse=True)))
    found = tokens_per_s_by_slots(profile, shape, config, curve)
    assert [slots for slots, _ in found] == [slots for slots, _ in curve]
    rates = [rate for _, rate in found]
    assert all(rate > 0 for rate in rates)
    if device == "auto" and misses in ("mixed", "cpu"):
        return  # a slow card with a fast processor beside it gains by a miss: both work at once
    assert all(later >= 0.999 * earlier for earlier, later in itertools.pairwise(rates))


def test_what_is_no_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        tokens_per_s_by_slots(
            read_machine("gcp-l4"), read_model("mixtral-8x7b"), EngineConfig("m", precision="int8"), [(3, 1.5)]
        )
