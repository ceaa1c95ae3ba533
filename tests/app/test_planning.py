"""Plans for the Tune page: what was timed on this machine decides, also between precisions."""

from __future__ import annotations

from dataclasses import replace

import pytest

import app.services.planning as planning
from app.services.machine_look import MachineLook
from app.services.planning import PlanQuestion
from app.views.tune.phrases import disk_warning
from engine.config import EngineConfig
from engine.hardware.measured import machine_profile
from engine.tuning.result import Correction
from tests.app import tuning_results as made

LOOK = made.look()
QUESTION = PlanQuestion(LOOK, EngineConfig("olmoe-1b-7b"))


def planned(monkeypatch: pytest.MonkeyPatch, *corrections: Correction) -> planning.Plan:
    monkeypatch.setattr(planning, "_corrections", lambda *_: corrections)
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


def test_what_would_help_is_counted_from_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    modelled = planned(monkeypatch)
    timed = planned(monkeypatch, *(Correction(name, False, 8, 0.5) for name in ("bf16", "int8", "int4")))
    assert timed.precision == modelled.precision
    assert timed.speed.decode_tokens_per_s == pytest.approx(0.5 * modelled.speed.decode_tokens_per_s)
    before, after = modelled.helps[0], timed.helps[0]
    assert (after.change, after.gain) == (before.change, before.gain)
    assert after.decode_tokens_per_s == pytest.approx(0.5 * before.decode_tokens_per_s)
    assert f"{after.decode_tokens_per_s:.3g} tokens/s" in timed.what_helps


def test_what_fits_nowhere_says_what_would() -> None:
    probe = replace(made.probe(), ram_bytes=3 * made.GIB, ram_available_bytes=2 * made.GIB)
    small = MachineLook(probe, "", None, machine_profile(probe, None))
    answer = planning.answer(PlanQuestion(small, EngineConfig("mixtral-8x22b")))
    assert answer.plan is None
    assert "fit" in answer.problem
    assert "GB" in answer.problem


def test_a_disk_without_room_is_said() -> None:
    look = made.look()
    plan = planning.answer(PlanQuestion(look, EngineConfig("deepseek-v3"))).plan
    assert plan is not None
    assert plan.disk_bytes
    assert look.probe.models_disk is not None
    full = replace(look, probe=replace(look.probe, models_disk=replace(look.probe.models_disk, free_bytes=made.GIB)))
    assert "1.0 GB are free" in disk_warning(plan, full)
    room = replace(look.probe.models_disk, free_bytes=4000 * made.GIB)
    assert disk_warning(plan, replace(look, probe=replace(look.probe, models_disk=room))) == ""
