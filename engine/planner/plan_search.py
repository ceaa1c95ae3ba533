"""Search for the fastest way to run a workload: a full simulation of all policies, or a quick one of a few."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.checkpoint.model_shape import ModelShape
from engine.hardware.machine import HardwareProfile
from engine.planner.costs import Cards, Observed, engine_costs
from engine.planner.engine_memory import engine_memory, from_disk, memory_rule
from engine.planner.plan_parts import Limits, Workload, worthwhile
from engine.planner.simulator.plans import BATCH_SYSTEMS, CGOPIPE, FLEXGEN_S4, KLOTSKI, POLICIES, run_all
from engine.planner.simulator.request import Outcome
from engine.planner.simulator.requests import Setting
from engine.planner.simulator.strategy import expected_statistics

ENGINE_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "Switchyard mixed": {},
    "Switchyard, misses on the CPU": {"misses": "cpu"},
    "Switchyard mixed, static": {"cache_policy": "static"},
    "Switchyard mixed, predicted": {"cache_policy": "static", "prefetch": "mlp"},
    "CPU only": {"device": "cpu"},
    "CPU experts": {"misses": "cpu", "cache_slots": 0},
    "on-demand": {"misses": "fetch", "cache_slots": 0},
    "whole-layer prefetch": {"misses": "layer"},
    "Fiddler": {"cache_policy": "static"},
    "CPU-GPU collaborative": {"misses": "cpu", "cache_policy": "lru"},
    "DuoServe-MoE": {"misses": "fetch", "cache_slots": 0, "prefetch": "mlp"},
}
"""Policy -> the `EngineConfig` settings that run it."""

EXECUTED_SCHEDULES = (CGOPIPE, KLOTSKI, FLEXGEN_S4)
"""Policies of many sequences that the batch executor runs exactly as simulated, preferred ones first.  FlexGen's CPU
attention is slower than the executor's, and DeepSpeed keeps keys and values on the card."""

_QUICK, _LONGER = 4, 12
"""MoE layers that the quick and the full simulation draw; fewer for many rows, which use all experts of a layer."""
_DRAWN_EXPERTS = 768
"""Experts over all layers that the full simulation draws for many rows; the quick one draws a third."""
_EQUAL = 1 - 1e-9
_SHORTLIST = ("Switchyard mixed, static", "Switchyard mixed", "CPU only")
_BATCH_SHORTLIST = (*_SHORTLIST, KLOTSKI, CGOPIPE)


@dataclass(frozen=True, slots=True)
class Question:
    """What to plan.

    Attributes:
        machine, model, workload, limits: what the plan is for.
        precision: of the experts.
        cards: how several cards share the model, where that has been decided.
        observed: what a run has found to be otherwise than predicted.
    """

    machine: HardwareProfile
    model: ModelShape
    workload: Workload
    limits: Limits
    precision: str
    cards: Cards = Cards.LAYERS
    observed: Observed = field(default=Observed())

    def setting(self, drawn_layers: int | None = None) -> Setting:
        """Input of the simulator, with the engine's own costs and memory; all layers are simulated by default."""
        if drawn_layers is not None and self.workload.sequences > 1:
            drawn_layers = max(2, min(drawn_layers, _DRAWN_EXPERTS * drawn_layers // _LONGER // self.model.experts))
        machine = self.machine if self.limits.use_card else replace(self.machine, gpu=None)
        costs = engine_costs(machine, self.model, self.precision, self.limits.threads, cards=self.cards)
        costs = replace(costs, observed=self.observed)
        rule = memory_rule(costs, self.limits)
        costs = from_disk(costs, engine_memory(costs, self.limits, on_card=False))
        if machine.gpu is not None and (on_card := engine_memory(costs, self.limits, on_card=True)) is not None:
            costs = replace(from_disk(costs, on_card), streamed_bytes=costs.streamed_bytes)
        return Setting(
            costs,
            self.workload,
            statistics=expected_statistics(self.model.experts),
            rule=rule,
            drawn_layers=drawn_layers,
        )


def runs_here(policy: str, workload: Workload) -> bool:
    """Whether the engine implements the policy; others are listed for comparison only."""
    return policy in ENGINE_SETTINGS or (workload.sequences > 1 and policy in EXECUTED_SCHEDULES)


def ways_to_share(question: Question) -> tuple[Cards, ...]:
    gpu, limits = question.machine.gpu, question.limits
    if gpu is None or gpu.count < 2 or not limits.use_card or question.model.experts < gpu.count:
        return (Cards.LAYERS,)
    return (Cards.LAYERS, Cards.EXPERTS) if limits.sharing == "auto" else (Cards(limits.sharing),)


def run_shared(question: Question, drawn_layers: int, names: Iterable[str] | None = None, **how: Any) -> list[Outcome]:
    """Each policy in the way to share the model among several cards that suits it best, the fastest first.

    Schedules of batches are run on one card, or on several that share each layer's experts.
    """
    found: dict[str, Outcome] = {}
    wanted, ways = tuple(POLICIES if names is None else names), ways_to_share(question)
    is_several = question.machine.gpu is not None and question.machine.gpu.count > 1
    for cards in ways:
        able = [name for name in wanted if not (is_several and cards is Cards.LAYERS and name in BATCH_SYSTEMS)]
        for one in run_all(replace(replace(question, cards=cards).setting(drawn_layers), **how), able):
            known = found.get(one.policy)
            if known is None or one.tokens_per_s > known.tokens_per_s:
                found[one.policy] = replace(one, cards=cards)
    return sorted(found.values(), key=lambda one: -one.tokens_per_s)


def search(question: Question) -> list[Outcome]:
    """All policies that fit, the fastest first; none is skipped, so no alternative can be faster than the first."""
    return run_shared(question, _LONGER)


def in_order(outcomes: Iterable[Outcome], workload: Workload) -> list[Outcome]:
    """The policies that the engine implements, the fastest first; ties go to the engine's default."""
    plainest = [*ENGINE_SETTINGS, *EXECUTED_SCHEDULES]
    able = [one for one in outcomes if runs_here(one.policy, workload)]
    best = max((one.tokens_per_s for one in able), default=0.0)
    equal = sorted(
        (one for one in able if one.tokens_per_s >= _EQUAL * best), key=lambda one: plainest.index(one.policy)
    )
    return [*equal, *(one for one in able if one not in equal)]


def quick_best(question: Question) -> Outcome | None:
    """The fastest of a few policies, to compare machines and precisions."""
    names = _SHORTLIST if question.workload.sequences == 1 else _BATCH_SHORTLIST
    found = run_shared(question, _QUICK, names, even_only=True)
    return found[0] if found else None


def choose_precision(question: Question) -> str:
    """The best quality that is not much slower than a lower one and that can be loaded; the lowest if nothing fits."""
    speeds = {}
    for precision in question.model.precisions:
        asked = replace(question, precision=precision)
        outcome = quick_best(asked) if _can_be_loaded(asked) else None
        if outcome is not None:
            speeds[precision] = outcome.tokens_per_s
    return worthwhile(speeds) or question.model.precisions[-1]


def _can_be_loaded(question: Question) -> bool:
    costs = question.setting().costs
    return any(
        engine_memory(costs, question.limits, on_card=on_card) is not None
        for on_card in {question.limits.use_card and costs.machine.gpu is not None, False}
    )
