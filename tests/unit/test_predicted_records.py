"""Simulated timelines as the engine's records: same lanes, same times, and counts that add up."""

import numpy as np
import pytest

from engine.checkpoint.model_shape import read_model
from engine.hardware.machine import read_machine
from engine.planner.costs import Costs
from engine.planner.plan_parts import Workload
from engine.planner.simulator.plans import run_policy
from engine.planner.simulator.requests import Setting
from engine.planner.simulator.sweeps import LANES
from engine.telemetry.lanes import COPY, NAMES, PHASE
from engine.telemetry.predicted import predicted_records
from engine.telemetry.records import SPAN, STEP, pack, unpack

_MODEL = read_model("deepseek-v2-lite")


def setting(sequences: int = 1) -> Setting:
    costs = Costs(read_machine("laptop-rtx-4060-8gb"), _MODEL, "int4")
    return Setting(costs, Workload("work", 64, 8, sequences), drawn_layers=4)


@pytest.mark.parametrize("policy", ["Fiddler", "CPU-GPU collaborative", "on-demand", "Switchyard mixed"])
def test_spans_and_steps_are_those_of_the_simulation(policy: str) -> None:
    outcome = run_policy(policy, setting(), record=True)
    assert outcome is not None
    spans, steps = predicted_records(outcome.spans, first_layer=_MODEL.dense_layers)
    assert spans.dtype == SPAN
    assert steps.dtype == STEP
    assert [LANES[lane] for lane in spans["lane"]] == [span.lane for span in outcome.spans]
    assert np.allclose(spans["start_ns"] / 1e9, [span.start for span in outcome.spans], atol=1e-8)
    assert (spans["end_ns"] >= spans["start_ns"]).all()
    assert not (spans["name"] == COPY).any()
    assert spans["layer"].max() == _MODEL.dense_layers + 3
    assert len(steps) == (spans["lane"] == PHASE).sum()
    assert NAMES[steps["name"][0]] == "prefill"
    assert {NAMES[name] for name in steps["name"][1:]} == {"decode"}
    # In decode every expert that a token uses is a hit, fetched, or computed by the CPU.
    used = steps["hits"] + steps["fetched"] + steps["on_cpu"]
    assert (used[1:] == 4 * _MODEL.experts_per_token).all()
    assert np.array_equal(unpack(pack(spans), SPAN), spans)


def test_nothing_simulated_is_nothing_recorded() -> None:
    spans, steps = predicted_records([])
    assert (len(spans), len(steps)) == (0, 0)
