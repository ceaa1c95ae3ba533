"""Policies in the simulator: physical, repeatable, monotonous, and Switchyard never behind."""

from collections import defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from engine.checkpoint.model_shape import model_names, read_model
from engine.hardware.machine import HardwareProfile, machine_names, read_machine
from engine.planner.costs import Costs
from engine.planner.plan_parts import WORKLOADS, Workload
from engine.planner.simulator.plans import POLICY_NAMES, SWITCHYARD, run_all, run_policy, switchyard
from engine.planner.simulator.request import Outcome
from engine.planner.simulator.requests import Setting
from engine.planner.simulator.sweeps import LANES

_SMALL = Workload("small", prompt_tokens=48, generated_tokens=16)
_OTHERS = [name for name in POLICY_NAMES if name != SWITCHYARD]


def setting(machine: str, model: str, workload: Workload, precision: str = "int4") -> Setting:
    return Setting(Costs(read_machine(machine), read_model(model), precision), workload)


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize("policy", _OTHERS)
@pytest.mark.parametrize("workload", [_SMALL, replace(_SMALL, beams=4), replace(_SMALL, sequences=24)], ids=str)
def test_spans_are_physical(policy: str, workload: Workload) -> None:
    outcome = run_policy(policy, setting("desktop-rtx-3060-12gb", "gpt-oss-20b", workload), record=True)
    assert outcome is not None
    assert outcome.spans
    ends: dict[tuple[str, bool], float] = defaultdict(float)
    first = outcome.ttft_s
    for span in outcome.spans:
        assert span.lane in LANES
        assert span.end > span.start >= span.ready >= 0
        if span.lane == "phase":
            continue
        name = "cpu" if span.lane.startswith("cpu") else span.lane
        # Of a batch, one prefill and one decode step are drawn, the latter after the former's whole time.
        key = (name, span.start >= first)
        assert span.start >= ends[key] - 1e-9
        ends[key] = max(ends[key], span.end)
    assert all(0 <= share <= 1 + 1e-9 for share in outcome.utilisation.values())
    assert outcome.seconds > 0
    assert outcome.ttft_s > 0
    assert outcome.vram_bytes <= read_machine("desktop-rtx-3060-12gb").vram_bytes
    assert outcome.hit_rate is None or 0 <= outcome.hit_rate <= 1


def faster(machine: HardwareProfile, part: str, factor: float) -> HardwareProfile:
    if part == "link":
        link = machine.link
        return replace(
            machine,
            link=replace(link, h2d=link.h2d * factor, d2h=link.d2h * factor, h2d_pageable=link.h2d_pageable * factor),
        )
    if part == "ram":
        return replace(machine, cpu=replace(machine.cpu, ram_bytes_per_s=machine.cpu.ram_bytes_per_s * factor))
    if part == "disk":
        return replace(machine, disk_bytes_per_s=machine.disk_bytes_per_s * factor)
    assert machine.gpu is not None
    return replace(machine, gpu=replace(machine.gpu, bytes_per_s=machine.gpu.bytes_per_s * factor))


@cache
def as_it_is(policy: str) -> tuple[Setting, Outcome | None]:
    given = setting("desktop-rtx-3070-8gb", "mixtral-8x7b", replace(_SMALL, sequences=1))
    return given, run_policy(policy, given)


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("part", ["link", "ram", "disk", "gpu"])
def test_more_bandwidth_makes_nothing_slower(policy: str, part: str) -> None:
    given, before = as_it_is(policy)
    better = replace(given, costs=replace(given.costs, machine=faster(given.costs.machine, part, 1.5)))
    after = run_policy(policy, better)
    assert before is not None
    assert after is not None
    # A different timing may change which expert has arrived when a cache must choose: hence the tolerance.
    assert after.seconds <= before.seconds * 1.02


# Every machine and every model once, each with another workload, a third of them by default: the whole product takes
# minutes.
_CELLS = [
    pytest.param(
        machine,
        model_names()[(3 * index) % len(model_names())],
        list(WORKLOADS)[index % len(WORKLOADS)],
        marks=[pytest.mark.exhaustive] if index % 6 else [],
    )
    for index, machine in enumerate(machine_names())
]


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(("machine", "model", "workload"), _CELLS)
def test_switchyard_is_never_slower_than_any_policy(machine: str, model: str, workload: str) -> None:
    given = setting(machine, model, WORKLOADS[workload])
    outcomes = run_all(given)
    ours = switchyard(outcomes, given)
    if ours is None:
        assert outcomes == []
        return
    assert all(ours.tokens_per_s >= outcome.tokens_per_s for outcome in outcomes)
    assert {outcome.policy for outcome in outcomes} <= set(_OTHERS)


def test_recorded_routing_that_repeats_itself_hits_whenever_the_slots_hold_it() -> None:
    given = setting("desktop-rtx-3060-12gb", "gpt-oss-20b", _SMALL)
    shape = given.costs.model
    same = np.tile(np.arange(shape.experts_per_token, dtype=np.int16), (32, shape.moe_layers, 1))
    outcome = run_policy("Switchyard mixed", replace(given, recorded=same, slots=shape.moe_layers * 8, ways=8))
    assert outcome is not None
    assert outcome.hit_rate is not None
    assert outcome.hit_rate > 0.9
    changing = np.stack([(same[0] + 8 * token) % shape.experts for token in range(32)]).astype(np.int16)
    other = run_policy("Switchyard mixed", replace(given, recorded=changing, slots=shape.moe_layers * 8, ways=8))
    assert other is not None
    assert other.hit_rate is not None
    assert other.hit_rate < outcome.hit_rate


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(KeyError):
        run_policy("magic", setting("desktop-rtx-3060-12gb", "gpt-oss-20b", _SMALL))
