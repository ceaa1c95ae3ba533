"""Seconds of a step: what they may never do, whatever the machine; the page's table is what the formula says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.step_table import drafts_lines, lines
from engine.checkpoint.model_shape import model_names, read_model
from engine.hardware.machine import machine_names, read_machine
from engine.planner.costs import GRAPH_OPERATOR_S, STEP_LAUNCHES, engine_costs
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


def test_a_hand_over_is_paid_in_each_layer_that_has_one() -> None:
    step = a_step()
    layers = step.costs.model.moe_layers
    steps = step.costs.steps
    assert steps is not None
    assert steps.exchange is not None
    later = replace(steps, exchange=replace(steps.exchange, layer_s=steps.exchange.layer_s + 1e-3))
    step = replace(step, way="cpu")  # else the engine would take the dispatcher
    slow = replace(step, costs=replace(step.costs, steps=later))
    assert slow.seconds(0.5) - step.seconds(0.5) == pytest.approx(layers * 1e-3)
    assert slow.seconds(0.5, whole_layers=8) - step.seconds(0.5, whole_layers=8) == pytest.approx((layers - 8) * 1e-3)
    assert slow.seconds(0.5, whole_layers=layers) == pytest.approx(step.seconds(0.5, whole_layers=layers))


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
