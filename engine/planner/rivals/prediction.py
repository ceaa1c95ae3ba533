"""Predicts published decode speeds of other programs with the engine's own model of a step's time.

No number is a result's, a program's or a machine's own: four hold for all of them (`FACTORS`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from engine.planner.costs import Costs, Dispatch, Efficiency
from engine.planner.memory import USABLE_SHARE
from engine.planner.rivals.published import PublishedSpeed
from engine.planner.simulator.residents import SimulatedResidents
from engine.planner.simulator.routing import (
    PUBLISHED_STATISTICS,
    STRONGEST_STATISTICS,
    RoutingSkew,
    popularity,
    routing,
)
from engine.planner.simulator.strategy import Residency
from engine.planner.step_time import StepTime

EFFICIENCY = Efficiency(arithmetic=0.35, card_memory=0.5, host_memory=0.35, operator_s=4e-6)
"""The least mean of |log(predicted / published)|, clipped at 0.5, over every other result, on a grid of four numbers;
arithmetic is the planner's own and decides nothing here.  The results in between did not decide about these numbers."""
HANDOVER = Dispatch(layer_s=50e-6)
"""Found together with them."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One number that holds for all programs and machines."""

    name: str
    value: float
    meaning: str


FACTORS = (
    Factor("host_memory", EFFICIENCY.host_memory, "share of the RAM's theoretical bandwidth at which processors read"),
    Factor("card_memory", EFFICIENCY.card_memory, "share of a card's memory bandwidth at which weights are read"),
    Factor("operator_s", EFFICIENCY.operator_s, "seconds to launch one operator on a card"),
    Factor("handover_s", HANDOVER.layer_s, "seconds a layer between card and processor: the routing's way and back"),
)
"""The only fitted numbers."""
_LAYERS, _TOKENS, _WARM_UP = 4, 96, 32
_FEW = 16
"""Experts of a layer up to which favourites are as weak as published for Mixtral; above, as in recorded answers."""


def predicted_tokens_per_s(
    speed: PublishedSpeed, efficiency: Efficiency = EFFICIENCY, handover: Dispatch = HANDOVER
) -> float:
    """Predicted decode speed of what a source describes."""
    method = speed.method
    costs = Costs(
        speed.machine, speed.model, threads=method.threads, efficiency=efficiency, dispatch=handover, score_bytes=0.0
    )
    on_card = method.way != "processor"
    step = StepTime(
        costs,
        on_card=on_card,
        way=method.way,
        context=method.context,
        disk_share=method.disk_share if on_card else 1.0,
        rows=method.rows,
        new_experts=new_experts(speed.model.experts, speed.model.experts_per_token) if method.rows > 1 else 1.0,
        reads_ahead=method.reads_ahead,
    )
    seconds = step.seconds(1 - hit_rate(speed), whole_layers=method.whole_layers)
    return method.tokens_per_step / seconds


def hit_rate(speed: PublishedSpeed) -> float:
    """Share of expert uses that hit: as published, else of synthetic routing with the cache that is described."""
    if speed.method.hits is not None:
        return speed.method.hits
    model = speed.model
    every = model.moe_layers * model.experts
    slots = speed.method.slots if speed.method.slots is not None else _fitting(speed)
    return expected_hits(model.experts, model.experts_per_token, min(slots / every, 1.0), speed.method.policy)


def _fitting(speed: PublishedSpeed) -> int:
    """Experts that fit on the card next to all other weights and the context's keys and values."""
    model, method = speed.model, speed.method
    others = model.non_expert_weights * model.other_bits / 8
    kv = model.kv_bytes_per_token() * method.context
    free = USABLE_SHARE * speed.machine.vram_bytes - others - kv - method.reserved_gb * 1e9
    return max(0, int(free / model.expert_bytes("")))


@functools.cache
def expected_hits(experts: int, per_token: int, share: float, policy: str) -> float:
    """Hits of a cache for this share of a layer's experts, from the planner's synthetic routing.

    Args:
        experts, per_token: of a layer.
        policy: `lru`, or `static` for the most popular ones.
    """
    statistics = _statistics(experts)
    shares = popularity(_LAYERS, experts, statistics)
    ways = round(share * experts)
    if not ways:
        return 0.0
    residency = Residency.STATIC if policy == "static" else Residency.CACHE
    residents = SimulatedResidents(residency, shares, ways * _LAYERS, ways)
    hits = uses = 0
    for number, token in enumerate(routing(_LAYERS, experts, per_token, _TOKENS, statistics)):
        for layer, chosen in enumerate(token[:, 0]):
            ids = [int(expert) for expert in chosen]
            found = [expert for expert in ids if residents.arrival(layer, expert) is not None]
            if number >= _WARM_UP:
                hits, uses = hits + len(found), uses + len(ids)
            residents.touch(layer, ids)
            for expert in ids:
                if expert not in found and residents.can_admit(layer, ids, 0.0):
                    residents.admit(layer, expert, 0.0, ids, 0.0)
    return hits / uses


@functools.cache
def new_experts(experts: int, per_token: int) -> float:
    """Share of a token's experts that the token before it did not use, from the same routing."""
    drawn = routing(_LAYERS, experts, per_token, _TOKENS, _statistics(experts))[:, :, 0]
    pairs = zip(drawn[:-1].reshape(-1, per_token), drawn[1:].reshape(-1, per_token), strict=True)
    again = sum(len(set(before.tolist()) & set(after.tolist())) for before, after in pairs)
    return 1 - again / ((_TOKENS - 1) * _LAYERS * per_token)


def _statistics(experts: int) -> RoutingSkew:
    return PUBLISHED_STATISTICS if experts <= _FEW else STRONGEST_STATISTICS
