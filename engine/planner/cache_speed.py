"""Decode speed with other numbers of expert slots, given the misses of each number (a miss-ratio curve).

The simulator answers the same question by playing steps.  Here the misses of each layer are a binomial draw
(`step_time`), so a whole curve takes about a millisecond and can follow a slider or a live session.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.hardware.machine import HardwareProfile
from engine.planner.costs import engine_costs
from engine.planner.engine_memory import memory_rule
from engine.planner.memory import share_on_disk
from engine.planner.predict import limits_of, predict_decode
from engine.planner.step_time import StepTime


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
    costs = engine_costs(machine, model, precision, config.threads, captures=config.graphs != "off")
    on_card = config.device != "cpu" and machine.gpu is not None
    # Without a card every miss is read from disk; with one, only the share that is not in RAM.
    rule = memory_rule(costs, limits_of(config))
    disk_share = share_on_disk(machine, model, precision, rule=rule) if on_card else 1.0
    step = StepTime(costs, on_card=on_card, way=config.misses, context=context, disk_share=disk_share)
    # With all of them there, nothing is looked up; two ways look away all the same.
    looks_up = not on_card or config.misses in ("off", "layer")
    curve = []
    for slots, miss_ratio in miss_ratio_curve:
        whole = 0 if looks_up or slots < model.moe_layers * model.experts else model.moe_layers
        share = 1.0 if config.misses == "off" and on_card else miss_ratio
        curve.append((slots, 1 / step.seconds(share, whole_layers=whole)))
    return curve
