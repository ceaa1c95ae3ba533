"""Seconds of a step: what they may never do, whatever the machine; the page's table is what the formula says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.model_shape import model_names, read_model
from engine.hardware.machine import machine_names, read_machine
from engine.planner.costs import Dispatch
from engine.planner.engine_costs import engine_costs
from engine.planner.step_table import lines
from engine.planner.step_time import StepTime

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
    step = a_step(machine, model)
    few, many = sorted(misses)
    of_disk = replace(step, disk_share=disk_share)
    assert 0 < step.seconds(few) <= step.seconds(many) * (1 + 1e-9)
    assert step.seconds(many) <= of_disk.seconds(many) * (1 + 1e-9)
    for way in ("cpu", "fetch"):
        assert of_disk.seconds(many) <= replace(of_disk, way=way).seconds(many) * (1 + 1e-9)
    layers = step.costs.model.moe_layers
    assert step.seconds(many, whole_layers=layers) <= step.seconds(few)


@given(machine=st.sampled_from(machine_names()), model=st.sampled_from(model_names()), misses=st.floats(0, 1))
def test_reading_ahead_never_hurts_a_processor(machine: str, model: str, misses: float) -> None:
    step = replace(a_step(machine, model), on_card=False, disk_share=1.0)
    assert replace(step, reads_ahead=True).seconds(misses) <= step.seconds(misses) * (1 + 1e-9)


def test_a_hand_over_is_paid_in_each_layer_that_has_one() -> None:
    step = a_step()
    layers = step.costs.model.moe_layers
    dispatch = step.costs.dispatch
    later = Dispatch(dispatch.layer_s + 1e-3, dispatch.card_s, dispatch.host_s)
    slow = replace(step, costs=replace(step.costs, dispatch=later))
    assert slow.seconds(0.5) - step.seconds(0.5) == pytest.approx(layers * 1e-3)
    assert slow.seconds(0.5, whole_layers=8) - step.seconds(0.5, whole_layers=8) == pytest.approx((layers - 8) * 1e-3)
    assert slow.seconds(0.5, whole_layers=layers) == pytest.approx(step.seconds(0.5, whole_layers=layers))


def test_drafts_cost_less_than_tokens_but_not_nothing() -> None:
    one = a_step()
    two = replace(one, rows=2.0, new_experts=0.6)
    assert two.used == 13
    assert two.drafts_s > 0
    assert one.seconds(0.5) < two.seconds(0.5) < 2 * one.seconds(0.5)
    assert one.drafts_s == replace(two, on_card=False).drafts_s == 0


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        a_step().seconds(share)


def test_the_page_has_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "step-time.md").read_text(encoding="utf-8")
    assert "\n".join(lines()) in page
