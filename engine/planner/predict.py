"""Predicts how fast the engine decodes with exactly these settings; validated against `bench decode`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.common.model_info import ModelInfo
from engine.formats import AUTO, is_precision
from engine.hardware.machine import HardwareProfile
from engine.planner.costs import Costs
from engine.planner.engine_costs import engine_costs
from engine.planner.engine_memory import EngineMemory, budgets_of, memory_of, memory_rule, sizes_of
from engine.planner.placement import NotEnoughRamError, resolve
from engine.planner.plan_parts import Limits
from engine.planner.simulator.outcome import Outcome
from engine.planner.simulator.requests import DECODE_STEPS, Setting, run_requests
from engine.planner.simulator.routing import RoutingSkew, expected_statistics
from engine.planner.simulator.strategy import HOST_ONLY, Miss, Prefetch, Residency, Strategy
from engine.planner.speed_range import both_ends
from engine.planner.workload import Workload


@dataclass(frozen=True, slots=True)
class DecodePrediction:
    """Decoding at batch 1.

    Attributes:
        tokens_per_s: predicted; low, high: range.
        ttft_s: time to first token.
        hit_rate: of the expert cache; None without one.
        memory: memory that will be held.
        precision: of the experts, `auto` resolved.
    """

    tokens_per_s: float
    low: float
    high: float
    ttft_s: float
    hit_rate: float | None
    memory: EngineMemory
    precision: str


def predict_decode(
    machine: HardwareProfile,
    model: ModelShape,
    config: EngineConfig,
    *,
    prompt_tokens: int = 32,
    tokens: int = 128,
    routing: NDArray[np.int16] | None = None,
    limits: Limits | None = None,
) -> DecodePrediction:
    """Predicts the decode speed of the engine with this configuration; for its range see `engine.planner.speed_range`.

    Args:
        machine: includes a card if one is used, measured or not; an emulated one too.
        routing: experts that consecutive tokens of this model used, [tokens, MoE layers, k], for this model's own hit
            rates; by default routing is synthetic, with published statistics.
        limits: what other programs leave of the machine; by default all of it.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`, the model does not fit.
    """
    limits = limits or limits_of(config)
    costs, memory = _placed(machine, limits.held(model, machine), config, limits)
    work = Workload("decode", prompt_tokens, tokens)
    found = _simulated(costs, memory, config, work, limits, routing=routing)
    slow, quick = (
        _simulated(end.applied(costs), memory, config, work, limits, routing=routing, statistics=end.statistics)
        for end in both_ends(costs, limits.cpu_of_others, is_shared=bool(memory.slots) and not memory.all_experts)
    )
    speed = found.decode_tokens_per_s
    return DecodePrediction(
        speed,
        min(speed, slow.decode_tokens_per_s),
        max(speed, quick.decode_tokens_per_s),
        found.ttft_s,
        found.hit_rate if memory.slots else None,
        memory,
        costs.precision,
    )


def simulate_decode(
    machine: HardwareProfile,
    model: ModelShape,
    config: EngineConfig,
    *,
    prompt_tokens: int = 32,
    tokens: int = 128,
    routing: NDArray[np.int16] | None = None,
    limits: Limits | None = None,
    record: bool = False,
) -> tuple[Outcome, EngineMemory, str]:
    """(simulated outcome behind `predict_decode`, memory that will be held, precision of the experts).

    Args:
        routing, limits: see `predict_decode`.
        record: keep the spans of the simulation.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`, the model does not fit.
    """
    limits = limits or limits_of(config)
    costs, memory = _placed(machine, limits.held(model, machine), config, limits)
    work = Workload("decode", prompt_tokens, tokens)
    return _simulated(costs, memory, config, work, limits, routing=routing, record=record), memory, costs.precision


def _placed(
    machine: HardwareProfile, model: ModelShape, config: EngineConfig, limits: Limits
) -> tuple[Costs, EngineMemory]:
    """(costs in the precision that loading would choose, memory that will be held)."""
    precisions = model.precisions if config.precision == AUTO else (config.precision,)
    costs = engine_costs(machine, model, precisions[0], config.threads)
    budgets = budgets_of(costs, limits, on_card=limits.use_card)
    try:
        placement = resolve(config, budgets, sizes_of(costs, limits, precisions))
    except NotEnoughRamError:
        raise _does_not_fit(model, machine) from None
    costs = engine_costs(machine, model, placement.precision, config.threads, captures=config.graphs != "off")
    return costs, memory_of(placement, costs, limits)


def _simulated(
    costs: Costs,
    memory: EngineMemory,
    config: EngineConfig,
    work: Workload,
    limits: Limits,
    *,
    routing: NDArray[np.int16] | None,
    statistics: RoutingSkew | None = None,
    record: bool = False,
) -> Outcome:
    setting = Setting(
        costs,
        work,
        statistics=statistics or expected_statistics(costs.model.experts),
        slots=memory.slots,
        ways=config.cache_ways or 0,
        rule=memory_rule(costs, limits),
        recorded=routing if routing is not None and len(routing) >= DECODE_STEPS else None,
    )
    outcome = run_requests(_strategy(config, memory), setting, record=record)
    if outcome is None:
        raise _does_not_fit(costs.model, costs.machine)
    return outcome


def _does_not_fit(model: ModelShape, machine: HardwareProfile) -> EngineError:
    sentence = f"{model.name} does not fit on {machine.name} with these settings."
    return EngineError(ErrorCode.NOT_ENOUGH_MEMORY, sentence)


def limits_of(config: EngineConfig) -> Limits:
    """The limits that a configuration implies."""
    return Limits(
        vram_bytes=config.vram_bytes,
        ram_bytes=config.ram_bytes,
        threads=config.threads,
        context_tokens=config.context_tokens,
        precision=config.precision,
        kv_precision=config.kv_precision,
        use_card=config.device != "cpu",
    )


def _strategy(config: EngineConfig, memory: EngineMemory) -> Strategy:
    if memory.card is None:
        return HOST_ONLY
    if config.misses == "layer":
        return Strategy("whole layers", prefetch=Prefetch.LAYER, grouped=True)
    miss = {"cpu": Miss.CPU, "fetch": Miss.FETCH}.get(config.misses, Miss.MIXED)
    kept = Residency.STATIC if config.cache_policy == "static" or memory.all_experts else Residency.CACHE
    mixed = Strategy("as configured", Residency.NONE if config.misses == "off" else kept, miss, grouped=True)
    return replace(mixed, prefetch=Prefetch.PREDICTED, prefetch_accuracy=0.85) if config.prefetch == "mlp" else mixed


def running_config(model: ModelInfo, asked: EngineConfig | None, slots: int | None) -> EngineConfig:
    """The configuration of a loaded model: as requested, with the values that the engine resolved.

    Args:
        slots: experts on the card, as last reported by the engine; None without a cache.
    """
    config = asked or EngineConfig(model.path)
    return replace(
        config,
        model=model.path or config.model,
        device=model.device,
        precision=model.precision if is_precision(model.precision) else AUTO,
        threads=model.threads,
        cache_slots=config.cache_slots if slots is None else slots,
    )


def recorded_config(about: Mapping[str, Any], slots: int | None) -> EngineConfig:
    """The same from the header of a recorded session; missing values are left to the engine."""
    stored = about.get("config")
    known = {field.name for field in fields(EngineConfig)}
    asked = {name: value for name, value in stored.items() if name in known} if isinstance(stored, dict) else {}
    config = EngineConfig(**{"model": str(about.get("model", "")), **asked})
    threads = about.get("threads")
    precision = str(about.get("precision", ""))
    return replace(
        config,
        device=str(about.get("device", "cpu")),
        precision=precision if is_precision(precision) else AUTO,
        threads=threads if isinstance(threads, int) and threads > 0 else None,
        cache_slots=config.cache_slots if slots is None else slots,
    )
