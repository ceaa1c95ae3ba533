"""In every cell of machines x models x workloads: no policy is faster than the plan, which the engine can run."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.model_shape import model_names, read_model
from engine.common.errors import EngineError, ErrorCode
from engine.hardware.machine import machine_names, read_machine
from engine.planner.plan import Limits, _memory, make_plan
from engine.planner.plan_parts import WORKLOADS
from engine.planner.plan_search import Question, choose_precision, in_order, runs_here, search

_CELLS = [(machine, model, work) for machine in machine_names() for model in model_names() for work in WORKLOADS]
_SHUFFLED = random.Random(5).sample(_CELLS, len(_CELLS))
_NOT_HERE = 1.3
"""How many times as fast a schedule may be that the engine has for many prompts only, given a single one: for a long
prompt it copies whole layers during attention, where a chat waits for the router (1.263 for GLM-4.5 on an RTX 3090)."""


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("cell", _SHUFFLED[:5], ids="/".join)
def test_no_policy_is_faster_than_the_plan(cell: tuple[str, str, str]) -> None:
    assert_nobody_is_faster(*cell)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("cell", _SHUFFLED[8:10], ids="/".join)
def test_a_plan_takes_the_first_of_them(cell: tuple[str, str, str]) -> None:
    machine, model, work = cell
    question = assert_nobody_is_faster(machine, model, work)
    able = [one for one in in_order(search(question), question.workload) if _memory(question, one) is not None]
    if not able:
        with pytest.raises(EngineError) as refused:
            make_plan(question.machine, question.model, question.workload)
        assert refused.value.code is ErrorCode.NOT_ENOUGH_MEMORY
        return
    plan = make_plan(question.machine, question.model, question.workload)
    assert (plan.policy, plan.precision) == (able[0].policy, question.precision)
    assert plan.speed.tokens_per_s == able[0].tokens_per_s
    assert runs_here(plan.policy, question.workload)


@pytest.mark.exhaustive
@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.timeout(3600)
def test_no_policy_is_faster_than_the_plan_in_any_cell(machine: str) -> None:
    for cell in _CELLS:
        if cell[0] == machine:
            assert_nobody_is_faster(*cell)


def assert_nobody_is_faster(machine: str, model: str, work: str) -> Question:
    """At the plan's precision and with the memory that the engine may use, by the same simulator."""
    question = Question(read_machine(machine), read_model(model), WORKLOADS[work], Limits(), "int4")
    question = replace(question, precision=choose_precision(question))
    outcomes = search(question)
    able = in_order(outcomes, question.workload)
    if not able:
        assert not outcomes
        return question
    ours = able[0].tokens_per_s
    for other in outcomes:
        allowed = 1.0 if runs_here(other.policy, question.workload) else _NOT_HERE
        assert other.tokens_per_s <= (1 + 1e-6) * allowed * ours, (other.policy, able[0].policy)
    return question


_FILES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K", "IQ2_XXS", "IQ1_S")


def _speeds(machine: str, model: str) -> list[float]:
    """Of those of a model's files that fit, the biggest first."""
    found = []
    for label in _FILES:
        try:
            plan = make_plan(read_machine(machine), as_quantised(read_model(model), label))
        except EngineError as error:
            if error.code is not ErrorCode.NOT_ENOUGH_MEMORY:
                raise
        else:
            found.append(plan.speed.tokens_per_s)
    return found


def assert_a_smaller_file_is_never_slower(machine: str, model: str) -> None:
    speeds = _speeds(machine, model)
    assert all(after >= 0.99 * before for before, after in pairwise(speeds)), (model, speeds)


def test_a_smaller_file_is_never_slower() -> None:
    assert_a_smaller_file_is_never_slower("desktop-no-gpu-64gb", "qwen3-30b-a3b")


@pytest.mark.exhaustive
@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.timeout(3600)
def test_a_smaller_file_is_never_slower_in_any_cell(machine: str) -> None:
    for model in model_names():
        assert_a_smaller_file_is_never_slower(machine, model)
