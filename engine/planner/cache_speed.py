"""Decode speed with other numbers of expert slots, given the misses of each number (a miss-ratio curve).

The simulator answers the same question by playing steps.  Here the misses of each layer are a binomial draw, so a whole
curve takes about a millisecond and can follow a slider or a live session.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import comb

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.hardware.machine import HardwareProfile
from engine.planner.costs import Costs
from engine.planner.engine_costs import engine_costs
from engine.planner.engine_memory import memory_rule
from engine.planner.memory import share_on_disk
from engine.planner.predict import limits_of, predict_decode


def tokens_per_s_by_slots(
    machine: HardwareProfile,
    model: ModelShape,
    config: EngineConfig,
    miss_ratio_curve: Iterable[tuple[int, float]],
    *,
    context: int = 256,
) -> list[tuple[int, float]]:
    """Predicted decode speed of one sequence, at each point of the curve.

    The slots are on the card if the configuration uses one, else in RAM in front of experts on disk.

    Args:
        config: how misses are served, threads, precision; `auto` is resolved as loading would.
        miss_ratio_curve: (slots, share of expert uses that miss with this many slots).
        context: tokens that each step attends to.

    Returns:
        (slots, tokens / s), in the order of the curve.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`: precision is `auto` and no precision of the model fits.
        ValueError: a miss ratio is not between 0 and 1.
    """
    precision = config.precision
    if precision == "auto":
        precision = predict_decode(machine, model, config, tokens=8).precision
    costs = engine_costs(machine, model, precision, config.threads)
    on_card = config.device != "cpu" and machine.gpu is not None
    # Without a card every miss is read from disk; with one, only the share that is not in RAM.
    rule = memory_rule(costs, limits_of(config))
    disk_s = costs.disk(costs.expert_bytes) * (share_on_disk(machine, model, precision, rule=rule) if on_card else 1.0)
    missing = range(model.experts_per_token + 1)
    if on_card:
        times = [_on_card_s(costs, config.misses, misses, context, disk_s) for misses in missing]
        # With all of them there, nothing is looked up; two ways look away all the same.
        looks_up = config.misses in ("off", "layer")
        times_of_all = times if looks_up else [_all_on_card_s(costs, context)] * len(times)
    else:
        times = times_of_all = [_on_cpu_s(costs, misses, context, disk_s) for misses in missing]
    fixed_s = _without_experts_s(costs, context, on_card)
    curve = []
    for slots, miss_ratio in miss_ratio_curve:
        if not 0 <= miss_ratio <= 1:
            raise ValueError(f"a miss ratio is between 0 and 1, not {miss_ratio}")
        share = 1.0 if config.misses == "off" and on_card else miss_ratio
        is_all = slots >= model.moe_layers * model.experts
        weights = _binomial(len(times) - 1, share)
        layer_s = sum(weight * time for weight, time in zip(weights, times_of_all if is_all else times, strict=True))
        curve.append((slots, 1 / (fixed_s + model.moe_layers * layer_s)))
    return curve


def _binomial(draws: int, share: float) -> list[float]:
    """Probability of each number of misses among the experts that one token uses in a layer."""
    return [comb(draws, n) * share**n * (1 - share) ** (draws - n) for n in range(draws + 1)]


def _without_experts_s(costs: Costs, context: int, on_card: bool) -> float:
    """Seconds of the head and the dense layers."""
    dense = costs.model.dense_layers
    if on_card:
        return costs.gpu_head(1) + dense * costs.gpu_layer(1, context, dense=True)
    return costs.cpu_head(1) + dense * costs.cpu_layer(1, context, dense=True)


def _on_cpu_s(costs: Costs, misses: int, context: int, disk_s: float) -> float:
    """Seconds of a MoE layer that reads `misses` of its experts from disk before computing them."""
    used = costs.model.experts_per_token
    return costs.cpu_layer(1, context) + misses * disk_s + costs.cpu_experts(used, used)


def _on_card_s(costs: Costs, way: str, misses: int, context: int, disk_s: float) -> float:
    """Seconds of a MoE layer with `misses` of its experts not on the card."""
    used, experts = costs.model.experts_per_token, costs.model.experts
    attention_s = costs.gpu_layer(1, context)
    if way == "layer":
        whole = max(costs.h2d(experts * costs.expert_bytes), experts * disk_s)
        return max(whole, attention_s + costs.gpu_experts(used, used, grouped=True))
    hits, dispatch = used - misses, costs.dispatch
    hits_s = costs.gpu_experts(hits, hits, grouped=True) + (dispatch.card_s if hits else 0.0)
    fetches = {"cpu": [0], "fetch": [misses]}.get(way, range(misses + 1))
    found = min(_served_s(costs, fetched, misses - fetched, hits_s, disk_s) for fetched in fetches)
    return attention_s + dispatch.layer_s + found


def _all_on_card_s(costs: Costs, context: int) -> float:
    """Seconds of a MoE layer whose experts are all on the card."""
    used = costs.model.experts_per_token
    return costs.gpu_layer(1, context) + costs.gpu_experts(used, used, grouped=True, shared=False)


def _served_s(costs: Costs, fetched: int, computed: int, hits_s: float, disk_s: float) -> float:
    """Seconds until a layer is done: some experts fetched while the card computes the hits, some computed on the CPU.

    The disk reads the CPU's experts first; experts it reads afterwards are copied to the card as they arrive.
    """
    read = computed * disk_s
    card_s = hits_s
    if fetched:
        copied = max(fetched * costs.transfer_expert() + disk_s, read + fetched * disk_s + costs.transfer_expert())
        card_s = max(hits_s, copied if disk_s else fetched * costs.transfer_expert()) + costs.gpu_experts(1)
    if not computed:
        return card_s
    host_s = costs.dispatch.host_s + costs.host_share(computed, computed)
    # Each expert is computed as it arrives, so only the last one's time is not hidden behind reading.
    return max(card_s, 2 * costs.activations(computed) + max(host_s, read + host_s / computed))
