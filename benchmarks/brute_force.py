"""`switchyard bench decode --brute-force`: the chosen settings against the best of all, each of them timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.bench.report import Report
from engine.checkpoint.catalogue import find_shape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.hardware.measured import machine_profile, save_measurements
from engine.hardware.probe import probe
from engine.planner.plan_parts import Limits
from engine.runtime.engine import Engine
from engine.tuning.measuring import measured_machine
from engine.tuning.race import (
    RacePace,
    RaceWatcher,
    Situation,
    choose_contestants,
    every_config,
    predicted,
    race,
    winner_of,
)
from engine.tuning.result import Contestant, Timed


def bench_brute_force(
    config: EngineConfig, tokens: int, repeats: int, report: Report, say: Callable[[str], None]
) -> None:
    """Adds a row for every setting that fits, and two that compare with the best of the same precision: the plan from
    measurements alone, and the result of tuning.

    Args:
        config: explicit settings stay; those that are `auto` or None are searched.
    """
    machine = probe()
    say("measuring the machine, unless that was done")
    found = measured_machine(
        machine,
        config,
        "quick",
        again=False,
        before_measuring=lambda: None,
        on_progress=lambda *_progress: None,
        cancelled=lambda: False,
    )
    if not found.kept:
        save_measurements(found.measurements)
    cores = max(1, min(machine.physical_cores or machine.usable_cpus, machine.usable_cpus))
    shape = find_shape(config.model)
    situation = Situation(
        machine=lambda precision: machine_profile(
            machine, found.measurements, precision=precision, expert_bytes=shape.expert_bytes(precision)
        ),
        model=shape,
        asked=config,
        before=config,
        has_card=bool(found.device),
        threads=tuple(range(1, cores + 1)),
        others=Limits(),
    )
    field = choose_contestants(situation)
    entrants = {one.name: one for one in field.contestants if not one.is_before or one.is_plan}
    for candidate in predicted(situation, every_config(situation)):
        one = candidate.contestant
        if one.config not in [other.config for other in entrants.values()]:
            entrants[one.name] = one
    timed = _timed(list(entrants.values()), RacePace(tokens, 4.0, repeats, 120.0), say)
    _rows(timed, [one.name for one in field.contestants], report)


def _timed(entrants: list[Contestant], pace: RacePace, say: Callable[[str], None]) -> list[Timed]:
    engine = Engine()
    watcher = RaceWatcher(
        loading=lambda name, done: say(f"timing {name}") if done == 0 else None,
        decoding=lambda _name, _done, _rate: None,
        timed=lambda _timed: None,
        cancelled=lambda: False,
    )
    try:
        raced = race(engine, entrants, pace, watcher)
    finally:
        engine.unload()
    # The best of the repeats: other programs can only slow things down.
    return [replace(one, tokens_per_s=max(one.rates)) if one.rates and not one.problem else one for one in raced]


def _rows(timed: list[Timed], chosen: list[str], report: Report) -> None:
    able = [one for one in timed if one.tokens_per_s]
    for one in able:
        predicted_rate = one.contestant.predicted_tokens_per_s
        report.add(one.contestant.name, [one.tokens_per_s], "tokens/s", predicted=predicted_rate)
    for one in timed:
        if one.problem:
            report.skip_peer(one.contestant.name, one.problem)
    plan = next((one for one in able if one.contestant.is_plan), None)
    settled = winner_of([one for one in able if one.contestant.name in chosen])
    if plan is None or settled is None:
        raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "The plan could not be run, so there is nothing to compare.")
    for name, one in (("the plan", plan), ("what tuning settles on", settled)):
        best = max((other for other in able if other.precision == one.precision), key=lambda other: other.tokens_per_s)
        against = f"best of {len(able)}: {best.contestant.name}"
        report.add(
            f"{name}: {one.contestant.name}",
            [one.tokens_per_s],
            "tokens/s",
            peer=against,
            peer_values=[best.tokens_per_s],
        )
