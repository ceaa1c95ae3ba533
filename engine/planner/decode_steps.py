"""How the engine runs a decode step on a card: as one graph, or by the dispatcher, operator by operator."""

from __future__ import annotations

from dataclasses import replace

from engine.planner.costs import Costs

MOST_ROWS = 16
"""That the kernels for decode steps take."""


def costs_of_step(
    costs: Costs, misses: str, *, rows: float = 1, disk_share: float = 0.0, has_all: bool = False
) -> Costs:
    """Costs of a step: what it launches, for how long each, and how a layer is handed over.

    A step of one token is one graph if all experts are on the card.  It is one, too, if the card can ask for what it
    misses, all experts are in RAM, and the CPU is to compute misses, by name or because it is sooner done with one than
    the link.  All others are launched one by one from Python.

    Args:
        misses: how they are met: `cpu`, `mixed`, or another way, which no graph has.
        rows: tokens of the step.
        disk_share: share of the misses that is read from disk first.
        has_all: all experts are on the card.
    """
    steps = costs.steps
    if steps is None or rows > MOST_ROWS:
        return costs
    launched = replace(costs, launches=steps.launches, steps=None)
    if rows > 1 or not steps.graph_operator_s:
        return launched
    graphed = replace(launched, efficiency=replace(costs.efficiency, operator_s=steps.graph_operator_s))
    if has_all:
        return graphed
    if steps.exchange is None or disk_share or not prefers_cpu(launched, misses):
        return launched
    more = replace(steps.launches, token=steps.launches.token + steps.exchange_token)
    return replace(graphed, launches=more, dispatch=steps.exchange)


def prefers_cpu(costs: Costs, misses: str) -> bool:
    """Whether a step has its misses computed by the CPU: asked for, or one is sooner computed than fetched."""
    fetched_s = costs.transfer_expert() + costs.gpu_experts(1)
    return misses == "cpu" or (misses == "mixed" and costs.cpu_experts(1) <= fetched_s)
