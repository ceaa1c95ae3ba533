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
    if has_all:
        return replace(launched, efficiency=replace(costs.efficiency, operator_s=steps.graph_operator_s))
    if disk_share or not prefers_cpu(launched, misses):
        return launched
    return _asking(costs) or launched


def ways_of_step(costs: Costs, misses: str, *, rows: float = 1, disk_share: float = 0.0) -> list[Costs]:
    """The same of all ways that the engine chooses from while it runs, by what a whole token takes."""
    first = costs_of_step(costs, misses, rows=rows, disk_share=disk_share)
    steps = costs.steps
    if misses != "mixed" or rows > 1 or disk_share or steps is None or not steps.graph_operator_s:
        return [first]
    asking = _asking(costs)
    return [replace(costs, launches=steps.launches, steps=None), *([asking] if asking is not None else [])]


def _asking(costs: Costs) -> Costs | None:
    """Costs of a step that is one graph and asks by flags for what it misses; `None` if the card has none."""
    steps = costs.steps
    if steps is None or steps.exchange is None:
        return None
    more = replace(steps.launches, token=steps.launches.token + steps.exchange_token)
    efficiency = replace(costs.efficiency, operator_s=steps.graph_operator_s)
    return replace(costs, launches=more, steps=None, efficiency=efficiency, dispatch=steps.exchange)


def prefers_cpu(costs: Costs, misses: str) -> bool:
    """Whether a step has its misses computed by the CPU: asked for, or one is sooner computed than fetched."""
    fetched_s = costs.transfer_expert() + costs.gpu_experts(1)
    return misses == "cpu" or (misses == "mixed" and costs.cpu_experts(1) <= fetched_s)
