"""Chooses what to time: the plan, the best alternatives by prediction, and the current settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import CACHE_FIELDS, EngineConfig
from engine.common.errors import EngineError
from engine.formats import AUTO, FORMATS, LADDER
from engine.hardware.cpu import compute_threads
from engine.hardware.machine import HardwareProfile
from engine.planner.plan import make_plan
from engine.planner.plan_parts import Limits, Plan
from engine.planner.plan_search import ENGINE_SETTINGS
from engine.planner.precision import worthwhile
from engine.planner.predict import predict_decode
from engine.planner.workload import CHAT
from engine.tuning.known_speed import corrected, corrected_plan, mechanism, with_decode
from engine.tuning.result import Contestant, Correction

_MOST = 3
_HOPEFUL = 0.5
"""Fraction of the best prediction, weighted by quality: candidates below are not worth loading."""
_ON_CARD = ("Switchyard mixed", "Switchyard, misses on the CPU", "Switchyard mixed, static", "whole-layer prefetch")


@dataclass(frozen=True)
class Situation:
    """The input of a tuning run.

    Attributes:
        machine: the machine by precision of the experts, each with its own measured rates.
        model: its shape.
        asked: the user's settings; before: the settings currently in effect.
        has_card: whether a device other than the CPU is used.
        threads: CPU thread counts worth trying.
        others: limits, including the bytes that other programs use.
        corrections: from earlier timings.
    """

    machine: Callable[[str], HardwareProfile]
    model: ModelShape
    asked: EngineConfig
    before: EngineConfig
    has_card: bool
    threads: tuple[int, ...]
    others: Limits
    corrections: tuple[Correction, ...] = ()


@dataclass(frozen=True)
class Field:
    """The contestants.

    Attributes:
        plan: the planner's first choice, corrected.
        contestants: in order of timing.
        modelled: uncorrected predictions by name; 0 if there is none.
    """

    plan: Plan
    contestants: tuple[Contestant, ...]
    modelled: dict[str, float]


@dataclass(frozen=True)
class Candidate:
    """A predicted way to run the model.

    Attributes:
        contestant: with the corrected prediction.
        precision: of the experts, `auto` resolved.
        modelled: tokens/s by the machine model alone.
        on_card: whether a device is used.
    """

    contestant: Contestant
    precision: str
    modelled: float
    on_card: bool

    @property
    def mechanism(self) -> tuple[Any, ...]:
        """A key that differs between different ways to run."""
        config = self.contestant.config
        return mechanism(config, self.precision, on_card=self.on_card, threads=config.threads or compute_threads())

    @property
    def worth(self) -> float:
        """Predicted tokens/s, less what the precision has to be faster by than the best quality."""
        ladder = LADDER[: LADDER.index(self.precision) + 1] if self.precision in LADDER else ()
        return self.contestant.predicted_tokens_per_s / math.prod(FORMATS[each].worth for each in ladder)


def choose_contestants(situation: Situation) -> Field:
    """The plan, up to two alternatives that may be better, and the current settings unless they are one of these.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`, with the nearest configuration that fits.
    """
    candidates = predicted(situation, every_config(situation))
    speeds: dict[str, float] = {}
    for one in candidates:
        speeds[one.precision] = max(speeds.get(one.precision, 0.0), one.contestant.predicted_tokens_per_s)
    asked = situation.asked.precision
    precision = (worthwhile(speeds) or asked) if asked == AUTO else asked
    plan = corrected_plan(_plan(situation, precision), situation.corrections)
    first = _predicted(situation, plan.policy, _from_plan(situation, plan))
    if first is not None:  # the plan and the first contestant are the same configuration, so they get the same figure
        same = first.contestant
        plan = with_decode(plan, same.predicted_tokens_per_s, same.low, same.high)
    # An explicitly requested card is used even if the plan would not use it.
    elsewhere = plan.card is None and situation.has_card and situation.asked.device != "auto"
    chosen = [first] if first is not None and not elsewhere else []
    ranked = sorted(candidates, key=lambda one: -one.worth)
    for one in ranked:
        hopeful = one.worth > _HOPEFUL * ranked[0].worth
        if len(chosen) < _MOST and hopeful and one.mechanism not in {other.mechanism for other in chosen}:
            chosen.append(one)
    before = _predicted(situation, "as it is now", situation.before)
    return _field(plan, chosen, before, situation)


def every_config(situation: Situation) -> list[tuple[str, EngineConfig]]:
    """(name, settings) of every allowed configuration; explicit settings stay unchanged."""
    asked, found = situation.asked, []
    precisions = situation.model.precisions if asked.precision == AUTO else (asked.precision,)
    for precision in precisions:
        base = replace(asked, precision=precision)
        for threads in situation.threads if asked.threads is None else (asked.threads,):
            if situation.has_card:
                found += [(how, replace(base, threads=threads, **ENGINE_SETTINGS[how])) for how in _on_card(asked)]
            if not situation.has_card or asked.device == "auto":
                found.append(("CPU only", replace(base, threads=threads, device="cpu")))
    return found


def predicted(situation: Situation, configs: Iterable[tuple[str, EngineConfig]]) -> list[Candidate]:
    """Predictions of those that fit."""
    return [one for how, config in configs if (one := _predicted(situation, how, config)) is not None]


def _on_card(asked: EngineConfig) -> Sequence[str]:
    plain = EngineConfig("")
    by_hand = any(getattr(asked, name) != getattr(plain, name) for name in CACHE_FIELDS)
    return _ON_CARD[:1] if by_hand else _ON_CARD


def _predicted(situation: Situation, how: str, config: EngineConfig) -> Candidate | None:
    on_cpu = replace(config, device="cpu") if not situation.has_card else config
    try:
        known = config.precision if config.precision != AUTO else situation.model.precisions[0]
        found = predict_decode(situation.machine(known), situation.model, on_cpu)
        if found.precision != known:
            found = predict_decode(situation.machine(found.precision), situation.model, on_cpu)
    except EngineError:
        return None
    on_card, rate = found.memory.card is not None, found.tokens_per_s
    threads = config.threads or compute_threads()
    modelled = rate, found.low, found.high
    rates = corrected(situation.corrections, found.precision, threads, modelled, on_card=on_card)
    ways = f", {config.cache_ways} ways" if on_card and config.cache_ways else ""
    how = (how if on_card else "CPU only") + ways
    name = f"{found.precision}, {how}, {threads} thread{'s' if threads > 1 else ''}"
    return Candidate(Contestant(name, config, *rates), found.precision, rate, on_card)


def _plan(situation: Situation, precision: str) -> Plan:
    asked = situation.asked
    others, use_card = situation.others, situation.has_card
    limits = Limits.of(
        replace(asked, precision=precision),
        use_card=use_card,
        vram_of_others=others.vram_of_others,
        ram_of_others=others.ram_of_others,
    )
    machine = situation.machine(precision if precision != AUTO else situation.model.precisions[0])
    return make_plan(machine, situation.model, CHAT, limits, measured=True)


def _from_plan(situation: Situation, plan: Plan) -> EngineConfig:
    """The plan's settings, overridden by explicit ones."""
    asked, plain = situation.asked, EngineConfig("")
    config = plan.engine_config(asked.model, asked.device)
    if asked.device != "auto":
        config = replace(config, device=asked.device)
    given = {name: value for name in CACHE_FIELDS if (value := getattr(asked, name)) != getattr(plain, name)}
    return replace(config, graphs=asked.graphs, speculation=asked.speculation, **given)


def _field(plan: Plan, chosen: list[Candidate], before: Candidate | None, situation: Situation) -> Field:
    now = before.mechanism if before is not None else None
    same = next((one for one in chosen if one.mechanism == now), None)
    found, modelled = [], {}
    for number, one in enumerate(chosen):
        name = one.contestant.name + (f" ({number + 1})" if one.contestant.name in modelled else "")
        found.append(replace(one.contestant, name=name, is_before=one is same, is_plan=number == 0))
        modelled[name] = one.modelled
    if same is None:
        present = Contestant("as it is now", situation.before, 0.0, 0.0, 0.0) if before is None else before.contestant
        name = present.name + (" (as it is now)" if present.name in modelled else "")
        modelled[name] = before.modelled if before is not None else 0.0
        found.insert(0, replace(present, name=name, is_before=True))
    return Field(plan, tuple(found), modelled)
