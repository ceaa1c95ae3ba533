"""How a card's memory is divided: bytes, expert slots, indexes and ways (CPU-GPU Collaborative, section III-B)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.checkpoint.model_shape import ModelShape
from engine.hardware.machine import HardwareProfile

USABLE_SHARE = 0.95
"""Share of a card's memory that allocations may take: the driver and fragmentation take the rest."""
RUNTIME_BYTES = 0.5e9
"""Runtime of a card: context, libraries and their workspaces."""
CHUNKS_TOGETHER = 8
"""Pieces of prompts that share each load of a layer: as many micro-batches, whose hidden states wait on the card."""
RAM_SHARE = 0.85
"""Share of the RAM that weights and caches may take."""


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """Usable memory of a machine, where it is known more exactly than by `USABLE_SHARE` and `RAM_SHARE`.

    Attributes:
        card: bytes of all cards together that allocations may take.
        runtime: bytes of these that are neither weights, nor keys and values, nor experts.
        ram: bytes of RAM for weights, keys and values.
        weights: bytes of the non-expert weights on the card; None for 16-bit weights.
        record: bytes of a slot for an expert where batches are this engine's own: all other weights stay on the card
            then, prompts are read in pieces, and a micro-batch takes room for its keys and values; None: as published.
        chunk: tokens of such a piece.
        staging: bytes of slots that single experts pass through in steps of few rows.
    """

    card: float
    runtime: float
    ram: float
    weights: float | None = None
    record: float | None = None
    chunk: int = 0
    staging: float = 0.0


def with_all_visits(rule: MemoryRule, model: ModelShape) -> MemoryRule:
    """The same for schedules that compute each expert for all micro-batches at once: a row for each choice of an expert
    waits to be added up."""
    visits = 2.0 * CHUNKS_TOGETHER * rule.chunk * model.experts_per_token * model.hidden
    return replace(rule, runtime=rule.runtime + visits) if rule.record is not None else rule


def usual_rule(machine: HardwareProfile) -> MemoryRule:
    """Shares of the data sheet's sizes."""
    return MemoryRule(machine.vram_bytes * USABLE_SHARE, RUNTIME_BYTES, machine.cpu.ram_bytes * RAM_SHARE)


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes on the card, by purpose.

    Attributes:
        usable: usable bytes of the card.
        weights: non-expert weights.
        kv: keys and values of the planned context.
        staging: buffers for experts in transfer.
        runtime: `RUNTIME_BYTES`.
    """

    usable: float
    weights: float
    kv: float
    staging: float
    runtime: float = RUNTIME_BYTES

    @property
    def held(self) -> float:
        """Everything on the card except resident experts."""
        return self.weights + self.kv + self.staging + self.runtime

    @property
    def for_experts(self) -> float:
        """Bytes left for resident experts; negative if even the rest does not fit."""
        return self.usable - self.held


def card_memory(
    machine: HardwareProfile,
    model: ModelShape,
    precision: str,
    *,
    cached_tokens: float,
    staging_experts: float = 1.0,
    rule: MemoryRule | None = None,
) -> CardMemory:
    """How a card's memory is divided before resident experts.

    Args:
        cached_tokens: context tokens of all sequences whose keys and values are on the card.
        staging_experts: expert records in addition to resident ones.
        rule: None for the usual one.
    """
    rule = rule or usual_rule(machine)
    return CardMemory(
        usable=rule.card,
        weights=model.non_expert_bytes() if rule.weights is None else rule.weights,
        kv=model.kv_bytes_per_token() * cached_tokens,
        staging=staging_experts * model.expert_bytes(precision),
        runtime=rule.runtime,
    )


def expert_slots(memory: CardMemory, model: ModelShape, precision: str) -> int:
    """S = floor(free VRAM / expert bytes), at most all experts."""
    fitting = int(max(memory.for_experts, 0.0) // model.expert_bytes(precision))
    return min(fitting, model.moe_layers * model.experts)


def indexes(slots: int, ways: int, layers: int) -> int:
    """N = floor(S / M): layers that have a set of their own."""
    return min(slots // ways, layers) if ways > 0 else 0


def share_on_disk(
    machine: HardwareProfile,
    model: ModelShape,
    precision: str,
    *,
    kv_bytes: float = 0.0,
    rule: MemoryRule | None = None,
) -> float:
    """Share of the expert bytes that does not fit into RAM next to `kv_bytes`."""
    room = (rule or usual_rule(machine)).ram - kv_bytes
    return min(1.0, max(0.0, 1.0 - room / model.all_expert_bytes(precision)))
