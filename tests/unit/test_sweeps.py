"""The schedules of a sweep, simulated."""

from hypothesis import given
from hypothesis import strategies as st

from engine.planner.schedules import CGOPIPE, HYBRID, S3, SCHEDULES, Schedule
from engine.planner.simulator.sweeps import CopyCost, LayerTimes, SweepParts, predicted_seconds

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
