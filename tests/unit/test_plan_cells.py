"""In every cell of machines x models x workloads: no policy is faster than what the plan takes, and none is missed."""

from __future__ import annotations

import random

import pytest

from engine.errors import EngineError, ErrorCode
from engine.planner.plan import Limits, make_plan
from engine.planner.plan_search import Question
from engine.planner.profile_files import machine_names, model_names, read_machine, read_model
from engine.planner.simulator.plans import run_all, run_policy
from engine.planner.workload import WORKLOADS

_CELLS = [(machine, model, work) for machine in machine_names() for model in model_names() for work in WORKLOADS]
_SHUFFLED = random.Random(5).sample(_CELLS, len(_CELLS))


@pytest.mark.parametrize("cell", _SHUFFLED[:8], ids="/".join)
def test_no_policy_is_faster_than_the_plan(cell: tuple[str, str, str]) -> None:
    assert_nobody_is_faster(*cell, layers=12)


@pytest.mark.slow
@pytest.mark.parametrize("cell", _SHUFFLED[8:16], ids="/".join)
def test_no_policy_is_faster_than_the_plan_in_more_cells(cell: tuple[str, str, str]) -> None:
    assert_nobody_is_faster(*cell, layers=12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.timeout(3600)
def test_no_policy_is_faster_than_the_plan_in_any_cell(machine: str) -> None:
    for cell in _CELLS:
        if cell[0] == machine:
            assert_nobody_is_faster(*cell, layers=12)


def assert_nobody_is_faster(machine_name: str, model_name: str, work: str, *, layers: int | None) -> None:
    """At the plan's precision and with the memory that the engine may use, by the same simulator."""
    machine, model, workload = read_machine(machine_name), read_model(model_name), WORKLOADS[work]
    at_least = Question(machine, model, workload, Limits(), "int4").setting(layers)
    if not run_all(at_least):
        with pytest.raises(EngineError) as refused:
            make_plan(machine, model, workload)
        assert refused.value.code is ErrorCode.NOT_ENOUGH_MEMORY
        return
    plan = make_plan(machine, model, workload)
    setting = Question(machine, model, workload, Limits(), plan.precision).setting(layers)
    ours = run_policy(plan.policy, setting)
    assert ours is not None
    for other in run_all(setting):
        assert other.tokens_per_s <= (1 + 1e-6) * ours.tokens_per_s, (other.policy, plan.policy)
