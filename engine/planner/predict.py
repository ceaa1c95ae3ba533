"""Predicts how fast the engine decodes with exactly these settings; validated against `bench decode`.

How far a predicted speed may be off: the same model of costs again, with what it rests on at both ends.

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
- an emulated card without a data sheet, which the same processor computes: calls by a factor of two.
  Three of them are busy at once (the kernels of CPU and card, and the copies), so that on fewer cores each may have to
  wait its turn.

What was measured of this very model on this machine replaces the prediction and its range.
"""

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
from engine.hardware.machine import HardwareProfile, LinkProfile, Origin
from engine.planner.costs import Cards, Costs, engine_costs
from engine.planner.engine_memory import EngineMemory, budgets_of, from_disk, memory_of, memory_rule, sizes_of
from engine.planner.placement import NotEnoughRamError, resolve
from engine.planner.plan_parts import Limits, Workload, share_on_disk
from engine.planner.simulator.request import Outcome
from engine.planner.simulator.requests import DECODE_STEPS, Setting, run_requests
from engine.planner.simulator.strategy import (
    HOST_ONLY,
    PUBLISHED_STATISTICS,
    STRONGEST_STATISTICS,
    Miss,
    Prefetch,
    Residency,
    RoutingSkew,
    Strategy,
    expected_statistics,
)
from engine.planner.step_time import StepTime

_MEASURED, _UNSTEADY, _LOOKED_UP, _IN_CACHE = 0.2, 0.35, 0.4, 0.1
_EMULATED_THREADS = 3
_CALLS, _UNTIMED_CALLS, _EMULATED_CALLS = (1.4, 0.65), (1.5, 0.2), (2.0, 0.5)
_CACHED_GAIN = (1.08, 2.3)
_CONTEXT = 256
"""Tokens that a step attends to."""
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
        calls = self.calls
        return replace(
            costs,
            machine=_faster(costs.machine, self.rates),
            efficiency=replace(costs.efficiency, operator_s=calls * costs.efficiency.operator_s),
            host_layer_s=calls * costs.host_layer_s,
            host_token_s=calls * costs.host_token_s,
            cached_gain=self.cached_gain,
            dispatch=costs.dispatch.slower(calls),
            steps=costs.steps.slower(calls) if costs.steps is not None else None,
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
        link=LinkProfile(
            factor * link.h2d, factor * link.d2h, factor * link.h2d_pageable, link.latency_s, factor * link.peer
        ),
        disk_bytes_per_s=factor * machine.disk_bytes_per_s,
    )


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
    """Predicts the decode speed of the engine with this configuration; for its range see `engine.planner.predict`.

    Args:
        machine: includes a card if one is used, measured or not; an emulated one too.
        routing: experts that consecutive tokens of this model used, [tokens, MoE layers, k], for this model's own hit
            rates; by default routing is synthetic, with published statistics.
        limits: what other programs leave of the machine; by default all of it.
    """
    limits = limits or Limits.of(config)
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
    record: bool = False,
) -> tuple[Outcome, EngineMemory, str]:
    """(simulated outcome behind `predict_decode`, memory that will be held, precision of the experts).

    Args:
        record: keep the spans of the simulation.
    """
    limits = Limits.of(config)
    costs, memory = _placed(machine, limits.held(model, machine), config, limits)
    work = Workload("decode", prompt_tokens, tokens)
    return _simulated(costs, memory, config, work, limits, record=record), memory, costs.precision


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
    costs = engine_costs(
        machine,
        model,
        placement.precision,
        config.threads,
        captures=config.graphs != "off",
        cards=Cards.EXPERTS if placement.shares else Cards.LAYERS,
    )
    memory = memory_of(placement, costs, limits)
    return from_disk(costs, memory), memory


def _simulated(
    costs: Costs,
    memory: EngineMemory,
    config: EngineConfig,
    work: Workload,
    limits: Limits,
    *,
    routing: NDArray[np.int16] | None = None,
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
    strategy = _strategy(config, memory, is_known=setting.recorded is not None)
    outcome = run_requests(strategy, setting, record=record)
    if outcome is None:
        raise _does_not_fit(costs.model, costs.machine)
    return outcome


def _does_not_fit(model: ModelShape, machine: HardwareProfile) -> EngineError:
    sentence = f"{model.name} does not fit on {machine.name} with these settings."
    return EngineError(ErrorCode.NOT_ENOUGH_MEMORY, sentence)


def _strategy(config: EngineConfig, memory: EngineMemory, *, is_known: bool) -> Strategy:
    """As the engine runs it; where it is known what is popular, a cache that picks its policy begins with that."""
    if memory.card is None:
        return HOST_ONLY
    if config.misses == "layer":
        return Strategy("whole layers", prefetch=Prefetch.LAYER, grouped=True)
    miss = {"cpu": Miss.CPU, "fetch": Miss.FETCH}.get(config.misses, Miss.MIXED)
    is_static = config.cache_policy == "static" or memory.all_experts or (is_known and config.cache_policy == "auto")
    kept = Residency.STATIC if is_static else Residency.CACHE
    mixed = Strategy("as configured", Residency.NONE if config.misses == "off" else kept, miss, grouped=True)
    return replace(mixed, prefetch=Prefetch.PREDICTED, prefetch_accuracy=0.85) if config.prefetch == "mlp" else mixed


def tokens_per_s_with(
    machine: HardwareProfile, model: ModelShape, config: EngineConfig, slots: int, miss_ratio: float
) -> float:
    """Decode speed of one sequence with another number of expert slots.

    The misses of each layer are a binomial draw (`StepTime`), where the simulator plays steps: that takes microseconds
    and can follow a live session.  The slots are on the card if the configuration uses one, else in RAM in front of
    experts on disk.

    Args:
        miss_ratio: share of expert uses that miss.

    Raises:
        ValueError: that is not between 0 and 1.
    """
    precision = config.precision
    if precision == "auto":
        precision = predict_decode(machine, model, config, tokens=8).precision
    costs = engine_costs(machine, model, precision, config.threads, captures=config.graphs != "off")
    on_card = config.device != "cpu" and machine.gpu is not None
    # Without a card every miss is read from disk; with one, only the share that is not in RAM.
    rule = memory_rule(costs, Limits.of(config))
    disk_share = share_on_disk(machine, model, precision, rule=rule) if on_card else 1.0
    step = StepTime(costs, on_card=on_card, way=config.misses, context=_CONTEXT, disk_share=disk_share)
    # With all of them there, nothing is looked up; two ways look away all the same.
    looks_up = not on_card or config.misses in ("off", "layer")
    whole = 0 if looks_up or slots < model.moe_layers * model.experts else model.moe_layers
    share = 1.0 if config.misses == "off" and on_card else miss_ratio
    return 1 / step.seconds(share, whole_layers=whole)


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
