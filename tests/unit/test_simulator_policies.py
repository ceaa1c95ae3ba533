"""The simulator: physical, repeatable, monotonous, and Switchyard never behind."""

import itertools
from collections import defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.model_shape import model_names, read_model
from engine.hardware.machine import HardwareProfile, machine_names, read_machine
from engine.planner.costs import Costs
from engine.planner.plan_parts import WORKLOADS, Workload
from engine.planner.schedules import CGOPIPE, HYBRID, S3, SCHEDULES, Schedule
from engine.planner.simulator.plans import POLICY_NAMES, SWITCHYARD, run_all, run_policy, switchyard
from engine.planner.simulator.request import Outcome
from engine.planner.simulator.requests import Setting
from engine.planner.simulator.sweeps import LANES, CopyCost, LayerTimes, Span, SweepParts, Timeline, predicted_seconds
from engine.telemetry.lanes import COPY, NAMES, PHASE
from engine.telemetry.predicted import predicted_records
from engine.telemetry.records import SPAN, STEP, pack, unpack

_SMALL = Workload("small", prompt_tokens=48, generated_tokens=16)
_OTHERS = [name for name in POLICY_NAMES if name != SWITCHYARD]


def setting(machine: str, model: str, workload: Workload, precision: str = "int4") -> Setting:
    return Setting(Costs(read_machine(machine), read_model(model), precision), workload)


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize("policy", _OTHERS)
@pytest.mark.parametrize("workload", [_SMALL, replace(_SMALL, beams=4), replace(_SMALL, sequences=24)], ids=str)
def test_spans_are_physical(policy: str, workload: Workload) -> None:
    outcome = run_policy(policy, setting("desktop-rtx-3060-12gb", "gpt-oss-20b", workload), record=True)
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
    assert outcome.hit_rate is not None
    assert outcome.hit_rate > 0.9
    changing = np.stack([(same[0] + 8 * token) % shape.experts for token in range(32)]).astype(np.int16)
    other = run_policy("Switchyard mixed", replace(given, recorded=changing, slots=shape.moe_layers * 8, ways=8))
    assert other.hit_rate is not None
    assert other.hit_rate < outcome.hit_rate


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(KeyError):
        run_policy("magic", setting("desktop-rtx-3060-12gb", "gpt-oss-20b", _SMALL))


_LANES = [lane for lane in LANES if lane != "phase"]
_WORK = st.lists(
    st.tuples(st.sampled_from(_LANES), st.floats(0, 10), st.lists(st.integers(0, 30), max_size=3)), max_size=40
)


def resource(span: Span) -> str:
    return "cpu" if span.lane in ("cpu_experts", "cpu_attention") else span.lane


@given(work=_WORK)
def test_a_resource_does_one_thing_at_a_time_and_waits_for_what_it_needs(
    work: list[tuple[str, float, list[int]]],
) -> None:
    timeline = Timeline()
    ends: list[float] = []
    for lane, seconds, needs in work:
        after = max((ends[need] for need in needs if need < len(ends)), default=0.0)
        ends.append(timeline.run(lane, seconds, "work", after))
        assert ends[-1] >= after
    by_resource: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        assert span.start >= span.ready
        by_resource[resource(span)].append(span)
    for spans in by_resource.values():
        for earlier, later in itertools.pairwise(spans):
            assert later.start >= earlier.end
            # Nothing idles: whoever may begin does.
            assert later.start == max(earlier.end, later.ready)
    assert timeline.end == max((span.end for span in timeline.spans), default=0.0)
    assert sum(timeline.busy_s(lane) for lane in LANES) == pytest.approx(sum(seconds for _, seconds, _ in work))


@given(work=_WORK, factor=st.floats(0.1, 1.0))
def test_faster_work_ends_no_later(work: list[tuple[str, float, list[int]]], factor: float) -> None:
    def last(scale: float) -> float:
        timeline = Timeline(record=False)
        ends: list[float] = []
        for lane, seconds, needs in work:
            after = max((ends[need] for need in needs if need < len(ends)), default=0.0)
            ends.append(timeline.run(lane, seconds * scale, "work", after))
        return timeline.end

    assert last(factor) <= last(1.0) * (1 + 1e-9)


SECONDS = st.floats(0.0001, 0.01)
EXPERTS = 8


@st.composite
def sweeps_of_parts(draw: st.DrawFn) -> SweepParts:
    wanted = draw(st.integers(4, EXPERTS))
    names = "before_s between_s after_s attention_s card_attention_s experts_s expert_s host_experts_s"
    times = LayerTimes(
        count=draw(st.integers(1, 6)),
        expert=CopyCost(draw(st.floats(0.0001, 0.01))),
        cache=CopyCost(draw(SECONDS)),
        experts=EXPERTS,
        wanted=wanted,
        hot=draw(st.integers(0, 4)),
        **{name: draw(SECONDS) for name in names.split()},
    )
    return SweepParts(draw(st.integers(2, 8)), times, draw(SECONDS))


def _seconds(schedule: Schedule, sweep: SweepParts, sweeps: int = 4) -> float:
    found = predicted_seconds(schedule, [sweep] * sweeps)
    assert found is not None
    return found


@given(sweeps_of_parts(), st.sampled_from([each for each in SCHEDULES.values() if each.order]))
def test_no_schedule_is_faster_than_its_busiest_part(sweep: SweepParts, schedule: Schedule) -> None:
    taken, layers, parts = _seconds(schedule, sweep), 4 * sweep.layers, sweep.times
    computing = parts.before_s + parts.between_s + parts.after_s
    together = schedule.name.startswith("klotski")
    in_ram = schedule.name.startswith("cpu-experts")
    experts = 0.0 if in_ram else parts.wanted * parts.expert_s if together else parts.count * parts.experts_s
    assert taken >= layers * (parts.count * computing + experts) * 0.999
    assert taken >= layers * parts.count * (parts.host_experts_s if in_ram else 0.0) * 0.999
    moved = 0 if in_ram else parts.experts if schedule.whole_layers else parts.wanted
    # The last sweep's successor is not waited for.
    assert taken >= (layers - 1) * parts.expert.seconds * moved * 0.999


@given(sweeps_of_parts())
def test_cgopipe_is_never_slower_than_one_micro_batch_after_the_other(sweep: SweepParts) -> None:
    assert _seconds(CGOPIPE, sweep) <= _seconds(S3, sweep) * 1.001


def test_what_is_not_simulated_is_not_predicted() -> None:
    assert predicted_seconds(HYBRID, []) is None


_MODEL = read_model("deepseek-v2-lite")


def recorded_setting(sequences: int = 1) -> Setting:
    costs = Costs(read_machine("laptop-rtx-4060-8gb"), _MODEL, "int4")
    return Setting(costs, Workload("work", 64, 8, sequences), drawn_layers=4)


@pytest.mark.parametrize("policy", ["Fiddler", "CPU-GPU collaborative", "on-demand", "Switchyard mixed"])
def test_spans_and_steps_are_those_of_the_simulation(policy: str) -> None:
    outcome = run_policy(policy, recorded_setting(), record=True)
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
