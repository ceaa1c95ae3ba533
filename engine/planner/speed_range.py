"""How far a predicted speed may be off: the same model of costs again, with what it rests on at both ends.

The slow end has it all against it, the quick end for it:

- rates: bandwidths and arithmetic as measured vary by 20% from run to run and between the shapes that were measured and
  this one; by more, up to 35%, if they changed that much while they were measured, or others were busy then; those of
  data sheets by 40%.
- calls: the fixed cost of calls, by 40% where calls were timed (a step finds caches and threads colder than a loop of
  calls does); where not, from a fifth (a newer processor) to half as much again.
- the cache of the processor: what fits into it is read up to 2.3 times as fast as RAM, or hardly faster where something
  else lies in it; that counts for the share of the model that fits, and what others do to the RAM for the rest.
- hits of the expert cache: from routing as even as published of Mixtral to favourites as strong as recorded of
  gpt-oss-20b and Qwen3-30B-A3B.
- other programs: the share of the processor that they use now is missing at the slow end; at the quick end they stop.
- an emulated card: its streams are threads of the same processor, which wait for each other: calls by a factor of two.
  Three of them are busy at once (the kernels of CPU and card, and the copies), so that on fewer cores each may have to
  wait its turn.

What was measured of this very model on this machine replaces the prediction and its range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.hardware.machine import HardwareProfile, LinkProfile, Origin
from engine.planner.costs import Costs, DecodeSteps, Dispatch
from engine.planner.simulator.routing import PUBLISHED_STATISTICS, STRONGEST_STATISTICS, RoutingSkew

_MEASURED, _UNSTEADY, _LOOKED_UP, _IN_CACHE = 0.2, 0.35, 0.4, 0.1
_EMULATED_THREADS = 3
_CALLS, _UNTIMED_CALLS, _EMULATED_CALLS = (1.4, 0.65), (1.5, 0.2), (2.0, 0.5)
_CACHED_GAIN = (1.08, 2.3)
_LEAST_LEFT = 0.25
"""Of the processor, however much others use: the system's scheduler gives each its turn."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """One end of the range.

    Attributes:
        rates: factor on bandwidths and arithmetic.
        calls: factor on the fixed seconds of calls.
        cached_gain: see `Costs`.
        statistics: of the routing.
    """

    rates: float
    calls: float
    cached_gain: float
    statistics: RoutingSkew

    def applied(self, costs: Costs) -> Costs:
        """The costs at this end."""
        calls = self.calls
        return replace(
            costs,
            machine=_faster(costs.machine, self.rates),
            efficiency=replace(costs.efficiency, operator_s=calls * costs.efficiency.operator_s),
            host_layer_s=calls * costs.host_layer_s,
            host_token_s=calls * costs.host_token_s,
            cached_gain=self.cached_gain,
            dispatch=_slower(costs.dispatch, calls),
            steps=_slower_steps(costs.steps, calls),
        )


def both_ends(costs: Costs, others: float, *, is_shared: bool) -> tuple[Doubt, Doubt]:
    """(the slow end, the quick end).

    Args:
        others: share of the processor that other programs use now, 0 to 1.
        is_shared: whether a card and the CPU both compute experts.
    """
    machine = costs.machine
    is_measured = machine.origins.get("cpu.ram_bytes_per_s") is Origin.MEASURED
    off = min(max(_MEASURED, machine.spread), _UNSTEADY) if is_measured else _LOOKED_UP
    off += costs.cached_share * (_IN_CACHE - off)
    slow, quick = _CALLS if machine.calls.native_s else _UNTIMED_CALLS
    left = max(_LEAST_LEFT, 1 - others)
    if costs.native_card and is_shared:
        slow, quick = max(slow, _EMULATED_CALLS[0]), min(quick, _EMULATED_CALLS[1])
        left *= min(1.0, machine.cpu.cores / _EMULATED_THREADS)
    return (
        Doubt(left * (1 - off), slow / left, _CACHED_GAIN[0], PUBLISHED_STATISTICS),
        Doubt(1 + off, quick, _CACHED_GAIN[1], STRONGEST_STATISTICS),
    )


def _slower(dispatch: Dispatch, calls: float) -> Dispatch:
    return replace(
        dispatch,
        layer_s=calls * dispatch.layer_s,
        card_s=calls * dispatch.card_s,
        host_s=calls * dispatch.host_s,
        host_expert_s=calls * dispatch.host_expert_s,
        card_call_s=calls * dispatch.card_call_s,
    )


def _slower_steps(steps: DecodeSteps | None, calls: float) -> DecodeSteps | None:
    if steps is None:
        return None
    exchange = None if steps.exchange is None else _slower(steps.exchange, calls)
    return replace(steps, graph_operator_s=calls * steps.graph_operator_s, exchange=exchange)


def _faster(machine: HardwareProfile, factor: float) -> HardwareProfile:
    cpu, gpu, link = machine.cpu, machine.gpu, machine.link
    return replace(
        machine,
        cpu=replace(
            cpu,
            flops=factor * cpu.flops,
            ram_bytes_per_s=factor * cpu.ram_bytes_per_s,
            weights_bytes_per_s={threads: factor * rate for threads, rate in cpu.weights_bytes_per_s.items()},
        ),
        gpu=replace(gpu, flops=factor * gpu.flops, bytes_per_s=factor * gpu.bytes_per_s) if gpu is not None else None,
        link=LinkProfile(factor * link.h2d, factor * link.d2h, factor * link.h2d_pageable, link.latency_s),
        disk_bytes_per_s=factor * machine.disk_bytes_per_s,
    )
