"""What goes where: bytes on the card, expert slots, indexes and ways (CPU-GPU Collaborative, section III-B)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.model_shape import ModelShape
from engine.hardware.machine import HardwareProfile

USABLE_SHARE = 0.95
"""Share of a card's memory that allocations may take: the rest is lost to the driver and to fragments."""
RUNTIME_BYTES = 0.5e9
"""A card's runtime: context, libraries, their workspaces."""
RAM_SHARE = 0.85
"""Share of the RAM that weights and caches may take."""


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """What of a machine's memory may be used, where it is known better than by `USABLE_SHARE` and `RAM_SHARE`.

    Attributes:
        card: bytes of all cards together that allocations may take.
        runtime: bytes of these that are neither weights, nor keys and values, nor experts.
        ram: bytes of RAM for weights, keys and values.
        weights: bytes of the non-expert weights on the card; None where they are kept in 16 bits.
    """

    card: float
    runtime: float
    ram: float
    weights: float | None = None


def usual_rule(machine: HardwareProfile) -> MemoryRule:
    """Shares of what the data sheet says."""
    return MemoryRule(machine.vram_bytes * USABLE_SHARE, RUNTIME_BYTES, machine.cpu.ram_bytes * RAM_SHARE)


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes on the card, by what they are for.

    Attributes:
        usable: of the card.
        weights: non-expert weights.
        kv: keys and values of the context planned for.
        staging: room for experts on their way.
        runtime: `RUNTIME_BYTES`.
    """

    usable: float
    weights: float
    kv: float
    staging: float
    runtime: float = RUNTIME_BYTES

    @property
    def held(self) -> float:
        """Everything on the card but resident experts."""
        return self.weights + self.kv + self.staging + self.runtime

    @property
    def for_experts(self) -> float:
        """What is left for resident experts; negative if even the rest does not fit."""
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
        cached_tokens: tokens of context, of all sequences together, whose keys and values are on the card.
        staging_experts: expert records beside the resident ones.
        rule: if not the usual one.
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
    """Share of the expert bytes that does not fit into RAM beside `kv_bytes`."""
    room = (rule or usual_rule(machine)).ram - kv_bytes
    return min(1.0, max(0.0, 1.0 - room / model.all_expert_bytes(precision)))
