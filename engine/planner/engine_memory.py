"""What the engine will hold in each tier, by its own arithmetic (`footprint`)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planner import footprint
from engine.planner.costs import Costs
from engine.planner.machine import GpuProfile
from engine.planner.memory import MemoryRule
from engine.planner.model_shape import ModelShape
from engine.planner.plan_parts import Limits, TierBytes
from engine.planner.precision import careful_precision, head_precision


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes by tier.

    Attributes:
        card: None if everything is on the CPU.
        ram: of weights and caches in RAM.
        disk: of experts that do not fit into RAM.
        slots: experts on the card, without staging.
        all_experts: all of them, for good.
    """

    card: TierBytes | None
    ram: TierBytes
    disk: int = 0
    slots: int = 0
    all_experts: bool = False


def record_nbytes(model: ModelShape, precision: str) -> int:
    """Bytes of one expert's record, scales and padding counted."""
    down = careful_precision(precision, model.total_weights)
    up = (model.expert_matrices - 1) * model.expert_width
    parts = [
        *footprint.matrix_part_bytes(up, model.hidden, precision),
        *footprint.matrix_part_bytes(model.hidden, model.expert_width, down),
    ]
    if model.expert_biases:
        width = 4 if precision == "fp32" else 2
        parts += [width * up, width * model.hidden]
    return footprint.record_bytes(parts)


def all_records_nbytes(model: ModelShape, precision: str) -> int:
    """Bytes of all routed experts' records."""
    return model.moe_layers * model.experts * record_nbytes(model, precision)


def dense_in_ram(model: ModelShape, precision: str) -> int:
    """Bytes of everything but the routed experts where it is quantised as they are.

    Embeddings, routers and norms are never quantised, and the head is int8 at the least; where it shares the
    embedding's weights it takes memory of its own once it is quantised.
    """
    width = 4 if precision == "fp32" else 2
    if precision not in ("int8", "int4"):
        return width * model.non_expert_weights
    careful = careful_precision(precision, model.total_weights)
    head = model.vocabulary * model.hidden
    routers = model.moe_layers * model.hidden * model.experts
    linear = model.non_expert_weights - model.embedding_weights - routers
    return (
        sum(footprint.matrix_part_bytes(1 + linear // model.hidden, model.hidden, careful))
        + sum(footprint.matrix_part_bytes(model.vocabulary, model.hidden, head_precision(precision)))
        + 2 * (routers + head)
    )


def dense_on_card(costs: Costs) -> int:
    """The same on a card: quantised on a real one, in 16 bits on an emulated one."""
    gpu, model, precision = costs.machine.gpu, costs.model, costs.precision
    if gpu is not None and _is_emulated(gpu):
        return dense_in_ram(model, "bf16" if precision in ("int8", "int4") else precision)
    return dense_in_ram(model, precision)


def memory_rule(costs: Costs, limits: Limits) -> MemoryRule:
    """What the engine may take of the card and of the RAM."""
    return MemoryRule(
        card_usable(costs, limits),
        activations(costs, limits)[1],
        ram_usable(costs, limits),
        weights=dense_on_card(costs),
    )


def card_usable(costs: Costs, limits: Limits) -> int:
    """Of all cards together: what others and the headroom leave."""
    gpu = costs.machine.gpu
    if gpu is None or not limits.use_card:
        return 0
    usable = max(0, costs.machine.vram_bytes - limits.vram_of_others - headroom_bytes(gpu))
    return usable if limits.vram_bytes is None else min(usable, limits.vram_bytes * gpu.count)


def headroom_bytes(gpu: GpuProfile) -> int:
    """Of all cards together; an emulated one has neither driver nor desktop."""
    return 0 if _is_emulated(gpu) else footprint.CARD_HEADROOM_BYTES * gpu.count


def _is_emulated(gpu: GpuProfile) -> bool:
    return gpu.name.startswith("emulated")


def ram_usable(costs: Costs, limits: Limits) -> int:
    """Of the RAM: what others and the headroom leave."""
    free = max(0, costs.machine.cpu.ram_bytes - limits.ram_of_others)
    usable = footprint.without_headroom(free)
    return usable if limits.ram_bytes is None else min(usable, limits.ram_bytes)


def activations(costs: Costs, limits: Limits) -> tuple[int, int]:
    """(tokens of a piece of a prompt on the card, bytes of its activations)."""
    model = costs.model
    each = footprint.activation_token_bytes(model.hidden, model.experts_per_token, _width(costs.precision))
    room = card_usable(costs, limits) - dense_on_card(costs)
    piece = footprint.piece_tokens(room, each, context_tokens(model, limits))
    return piece, piece * each


def context_tokens(model: ModelShape, limits: Limits) -> int:
    """The longest context that will be allowed."""
    return min(model.context_tokens, limits.context_tokens or model.context_tokens)


def engine_memory(
    costs: Costs,
    limits: Limits,
    *,
    on_card: bool,
    misses: str = "mixed",
    cache_slots: int | None = None,
    ways: int | None = None,
) -> EngineMemory | None:
    """What is held once a model is loaded and its first conversation has begun.

    Args:
        on_card: the dense weights and as many experts as fit are on the card.
        misses, cache_slots, ways: as in `EngineConfig`.

    Returns:
        None if the model does not fit so.
    """
    model, precision = costs.model, costs.precision
    if not on_card:
        return _on_cpu(costs, limits)
    usable, gpu = card_usable(costs, limits), costs.machine.gpu
    if gpu is None or not usable:
        return None
    context, record = context_tokens(model, limits), record_nbytes(model, precision)
    every = model.moe_layers * model.experts
    dense = dense_on_card(costs)
    kv = round(model.kv_bytes_per_token()) * _width(precision) // 2
    working = activations(costs, limits)[1]
    if footprint.device_needs(dense, 1, working, kv, context) > usable:
        return None
    roomy = context if limits.context_tokens else min(context, footprint.ROOMY_KV_TOKENS)
    as_usual = cache_slots is None and misses == "mixed" and gpu.count == 1
    held_kv = min(context, footprint.KV_TOKENS) * kv
    headroom = headroom_bytes(gpu)
    total = costs.machine.vram_bytes
    others = limits.vram_of_others
    if as_usual and dense + every * record + working + roomy * kv <= usable:
        card = TierBytes(total, dense, every * record, 0, held_kv, working, headroom, others)
        return EngineMemory(card, _ram(costs, limits), 0, every, True)
    budget = max(0, usable - dense - held_kv - working)
    staging = footprint.staging_slots(budget, record, misses, cache_slots)
    most = max(0, budget // record - staging) if misses != "layer" else 0
    wanted = min(every if cache_slots is None else min(cache_slots, every), most)
    piece_slots = footprint.pool_segment_slots(wanted, every, ways)
    slots = piece_slots * footprint.pool_segments(wanted, piece_slots, model.moe_layers, every, ways)
    buffers = min(2 * model.experts, budget // record) if misses == "layer" else staging
    card = TierBytes(total, dense, slots * record, buffers * record, held_kv, working, headroom, others)
    found = _experts_in_ram(costs, limits, 0)
    return None if found is None else EngineMemory(card, found[0], found[1], slots)


def _on_cpu(costs: Costs, limits: Limits) -> EngineMemory | None:
    found = _experts_in_ram(costs, limits, dense_in_ram(costs.model, costs.precision))
    return None if found is None else EngineMemory(None, *found)


def _experts_in_ram(costs: Costs, limits: Limits, dense: int) -> tuple[TierBytes, int] | None:
    """(RAM, bytes on disk), or None if not even a few slots over the disk fit."""
    model, record = costs.model, record_nbytes(costs.model, costs.precision)
    usable, everything = ram_usable(costs, limits), all_records_nbytes(model, costs.precision)
    kv = 0
    if dense:
        per_token = round(model.kv_bytes_per_token()) * _width(costs.precision) // 2
        kv = min(context_tokens(model, limits), footprint.FEWEST_KV_TOKENS) * per_token
    if dense + everything <= usable:
        return _ram(costs, limits, weights=dense, experts=everything, kv=kv), 0
    if dense + max(model.experts_per_token, 1) * record > usable:
        return None
    spare = usable // 10 if limits.ram_bytes is None else 0
    slots = max(model.experts_per_token, (usable - dense - spare) // record)
    return _ram(costs, limits, weights=dense, experts=slots * record, kv=kv), everything


def _ram(costs: Costs, limits: Limits, *, weights: int = 0, experts: int = 0, kv: int = 0) -> TierBytes:
    total = costs.machine.cpu.ram_bytes
    free = max(0, total - limits.ram_of_others)
    return TierBytes(
        total,
        weights,
        experts,
        kv=kv,
        headroom=max(0, free - footprint.without_headroom(free) - kv),
        other_programs=limits.ram_of_others,
    )


def _width(precision: str) -> int:
    return 4 if precision == "fp32" else 2
