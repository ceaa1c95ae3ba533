"""All policies on one machine, model and workload, and the one that Switchyard would choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine.planner.memory import card_memory
from engine.planner.simulator.batch import CGOPIPE, DEEPSPEED, FLEXGEN_S3, FLEXGEN_S4, KLOTSKI, run_batches
from engine.planner.simulator.request import Outcome
from engine.planner.simulator.requests import Setting, run_requests
from engine.planner.simulator.strategy import IDEAL_PREFETCH, OWN, PUBLISHED, Residency, Strategy

SWITCHYARD = "Switchyard"

BATCH_SYSTEMS = (DEEPSPEED, FLEXGEN_S4, FLEXGEN_S3, CGOPIPE, KLOTSKI)
"""Policies of many sequences."""

REQUEST_STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (*PUBLISHED, *OWN)}
"""Schedules of single requests, by policy."""

POLICIES = (*REQUEST_STRATEGIES, *BATCH_SYSTEMS)
"""All policies."""
POLICY_NAMES = (SWITCHYARD, *POLICIES)


def run_policy(name: str, setting: Setting, *, record: bool = False) -> Outcome | None:
    """One policy at its best: the number of cache ways or the batch size that suits it best.

    Returns:
        None if the model does not fit under this policy.

    Raises:
        KeyError: no such policy.
    """
    if name == SWITCHYARD:
        return switchyard(run_all(setting), setting, record=record)
    tried = list(_candidates(name, setting, record=False))
    if not tried:
        return None
    best = max(range(len(tried)), key=lambda index: tried[index].tokens_per_s)
    if not record:
        return tried[best]
    return list(_candidates(name, setting, record=True))[best]


def run_all(setting: Setting, names: Iterable[str] | None = None) -> list[Outcome]:
    """Every policy that fits, or those of `names` that fit, the fastest first."""
    names = POLICIES if names is None else names
    outcomes = [run_policy(name, setting) for name in names]
    return sorted((outcome for outcome in outcomes if outcome), key=lambda outcome: -outcome.tokens_per_s)


def switchyard(outcomes: list[Outcome], setting: Setting, *, record: bool = False) -> Outcome | None:
    """Switchyard's choice: the fastest of all policies, published ones and its own.

    Args:
        outcomes: from `run_all`.
    """
    if not outcomes:
        return None
    best = outcomes[0]
    drawn = run_policy(best.policy, setting, record=True) if record else best
    assert drawn is not None
    return replace(drawn, policy=f"{SWITCHYARD}: {best.policy}")


def _candidates(name: str, setting: Setting, *, record: bool) -> Iterator[Outcome]:
    if name in REQUEST_STRATEGIES:
        strategy = REQUEST_STRATEGIES[name]
        ways = _ways(setting) if strategy.residency is Residency.CACHE else [0]
        for count in ways:
            outcome = run_requests(strategy, replace(setting, ways=count), record=record)
            if outcome is not None:
                yield outcome
        return
    if name not in BATCH_SYSTEMS:
        raise KeyError(name)
    yield from run_batches(name, setting, record=record)


def _ways(setting: Setting) -> list[int]:
    """Slots spread evenly over all layers, and fuller sets for the first layers only (CPU-GPU Collaborative, IV-C)."""
    if setting.ways or setting.even_only:
        return [setting.ways]
    model, experts = setting.costs.model, setting.costs.model.experts
    machine, precision = setting.costs.machine, setting.costs.precision
    if card_memory(machine, model, precision, cached_tokens=0, rule=setting.rule).for_experts >= (
        model.all_expert_bytes(setting.costs.precision) * 1.5
    ):
        return [0]
    return sorted({0, max(1, experts // 4), max(1, experts // 2), experts})


def bounds(setting: Setting) -> list[Outcome]:
    """The upper bound of a schedule that knows each layer's experts one layer ahead."""
    outcome = run_requests(IDEAL_PREFETCH, setting)
    return [outcome] if outcome else []
