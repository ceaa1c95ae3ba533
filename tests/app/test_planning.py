"""Plans for the Tune page: what was timed on this machine decides, also between precisions."""

from dataclasses import replace
from pathlib import Path

import pytest

import app.services.planning as planning
import engine.tuning.machine_state as machine_look
from app.services.planning import PlanQuestion
from app.views.tune.phrases import disk_warning, speed_range
from app.widgets.quantities import figures
from engine.common.config import EngineConfig
from engine.hardware.measured import machine_profile
from engine.protocol import StartTuning
from engine.tuning.machine_state import MachineLook
from engine.tuning.race import Situation, choose_contestants
from engine.tuning.result import Contestant, Correction, Timed, TuningResult
from engine.tuning.run import tune
from tests.app import tuning_results as made
from tests.unit.made_up_tuning import MACHINE, MadeUpEngine, around, measurements, others_take, tiny_model

LOOK = made.look()
QUESTION = PlanQuestion(LOOK, EngineConfig("olmoe-1b-7b"))


def planned(monkeypatch: pytest.MonkeyPatch, *corrections: Correction) -> planning.Plan:
    monkeypatch.setattr(machine_look, "corrections_here", lambda *_: corrections)
    plan = planning.answer(QUESTION).plan
    assert plan is not None
    return plan


def test_what_was_timed_chooses_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    modelled = planned(monkeypatch)
    slow = Correction(modelled.precision, False, modelled.threads, 0.2)
    other = next(name for name in ("bf16", "int8", "int4") if name != modelled.precision)
    timed = planned(monkeypatch, slow, Correction(other, False, modelled.threads, 1.0))
    assert timed.precision != modelled.precision
    assert {one.precision for one in timed.alternatives} >= {"bf16", "int8", "int4"} - {timed.precision}
    losers = [one for one in timed.alternatives if one.precision == modelled.precision and one.policy == "CPU only"]
    assert losers
    assert losers[0].speed.decode_tokens_per_s == pytest.approx(0.2 * modelled.speed.decode_tokens_per_s, rel=0.01)


def as_timed(plan: planning.Plan, rate: float, config: EngineConfig) -> TuningResult:
    """A result in which the plan's own settings were timed."""
    way = Contestant("the plan", config, plan.speed.decode_tokens_per_s, 0.0, 0.0, is_plan=True)
    timed = Timed(way, rate, (0.9 * rate, rate, 1.1 * rate), 0.1, 1.0, "cpu", plan.precision, plan.threads)
    return replace(made.result(LOOK), timed=(timed,), winner=way.name)


def test_what_was_timed_is_the_figure_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    modelled = planned(monkeypatch)
    rate = 1.2 * modelled.speed.decode_tokens_per_s
    result = as_timed(modelled, rate, modelled.engine_config("olmoe-1b-7b"))
    monkeypatch.setattr(machine_look, "_mark", lambda _model: "olmoe")
    monkeypatch.setattr(machine_look, "resolve", Path)  # as if it were here, and had never answered
    monkeypatch.setattr(machine_look, "results_here", lambda *_: (result,))
    timed = planned(monkeypatch)
    assert (timed.precision, timed.policy, timed.threads) == (modelled.precision, modelled.policy, modelled.threads)
    assert timed.speed.decode_tokens_per_s == rate
    assert timed.speed.predicted == modelled.speed.decode_tokens_per_s
    assert timed.speed.timed_at == result.taken_at
    said = speed_range(timed)
    assert figures(modelled.speed.decode_tokens_per_s) in said
    other = replace(result.timed[0], threads=modelled.threads - 1)
    monkeypatch.setattr(machine_look, "results_here", lambda *_: (replace(result, timed=(other,)),))
    assert planned(monkeypatch).speed == modelled.speed  # other settings: not its figure


def test_the_plan_is_predicted_as_it_will_be_in_the_race() -> None:
    """With the same machine and model the page and the race have one figure for one way of running it."""
    shape = planning._shape("olmoe-1b-7b")
    plan = planning.answer(QUESTION).plan
    field = choose_contestants(
        Situation(
            machine=lambda precision: LOOK.machine(precision, shape.expert_bytes(precision)),
            model=shape,
            asked=QUESTION.config,
            before=QUESTION.config,
            has_card=False,
            threads=(plan.threads,),
            others=LOOK.limits(QUESTION.config),
        )
    )
    mine = next(one for one in field.contestants if one.is_plan)
    assert field.plan.speed.decode_tokens_per_s == mine.predicted_tokens_per_s
    if (field.plan.precision, field.plan.policy) == (plan.precision, plan.policy):
        assert plan.speed.decode_tokens_per_s == pytest.approx(mine.predicted_tokens_per_s)


@pytest.mark.parametrize("others", [0.0, 0.9])
def test_after_a_run_the_page_has_the_figure_that_was_timed(monkeypatch: pytest.MonkeyPatch, others: float) -> None:
    """All the way: a run is kept, and the plan of the same machine and model says what it timed."""
    monkeypatch.setattr("engine.tuning.race.compute_threads", lambda: 4)
    model = str(tiny_model())
    config = EngineConfig(model)
    taken = measurements(MACHINE)
    look = MachineLook(MACHINE, "", taken, machine_profile(MACHINE, taken))
    before = planning.answer(PlanQuestion(look, config)).plan
    assert not before.speed.timed_at

    def speed(asked: EngineConfig) -> float:
        return 0.8 * before.speed.decode_tokens_per_s * (1.0 if asked.precision == before.precision else 0.5)

    request = StartTuning("t", config, even_if_busy=True)
    around_us = around(watch=others_take(lambda: others))
    result = tune(MadeUpEngine(speed), request, lambda _event: None, lambda: False, around_us).result
    after = planning.answer(PlanQuestion(look, config)).plan
    if others:  # what other programs have spoiled changes nothing that is said of this machine
        assert after.speed == before.speed
        return
    assert (after.precision, after.threads) == (before.precision, before.threads)
    (plan,) = [one for one in result.timed if one.contestant.is_plan]
    assert after.speed.decode_tokens_per_s == plan.tokens_per_s
    assert after.speed.predicted == plan.contestant.predicted_tokens_per_s
    assert after.speed.timed_at == result.taken_at


def test_what_fits_nowhere_says_what_would() -> None:
    probe = replace(made.probe(), ram_bytes=3 * made.GIB, ram_available_bytes=2 * made.GIB)
    small = MachineLook(probe, "", None, machine_profile(probe, None))
    answer = planning.answer(PlanQuestion(small, EngineConfig("mixtral-8x22b")))
    assert answer.plan is None
    assert "fit" in answer.problem
    assert "GB" in answer.problem


def test_a_disk_without_room_is_said() -> None:
    look = made.look()
    plan = planning.answer(PlanQuestion(look, EngineConfig("qwen3-235b-a22b"))).plan
    assert plan.disk_bytes
    assert look.probe.models_disk is not None
    full = replace(look, probe=replace(look.probe, models_disk=replace(look.probe.models_disk, free_bytes=made.GIB)))
    assert "1.0 GB are free" in disk_warning(plan, full)
    room = replace(look.probe.models_disk, free_bytes=4000 * made.GIB)
    assert disk_warning(plan, replace(look, probe=replace(look.probe, models_disk=room))) == ""
