"""DuoServe-MoE's memory on the card: what its schedule, and those it is compared with, hold at their peak."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from engine.checkpoint.model_shape import ModelShape
from engine.formats import format_of
from engine.planner.memory import RUNTIME_BYTES

LAYER_WIDTHS = (2048, 1024, 512, 256, 128, 64)
"""Hidden widths of the predictor: seven fully connected layers with the output's."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Bytes on the card at the peak.

    Attributes:
        non_experts: weights that always stay.
        experts: resident and arriving expert records.
        kv: of the context planned for.
        unpacked: one expert's 16-bit weights, if a prefill unpacks quantised ones.
        predictor: of the experts to come.
    """

    non_experts: float
    experts: float
    kv: float
    unpacked: float
    predictor: float = 0.0

    @property
    def total(self) -> float:
        return self.non_experts + self.experts + self.kv + self.unpacked + self.predictor + RUNTIME_BYTES


def peak_memory(
    model: ModelShape, precision: str, experts_held: int, *, non_experts: float, context: int, predictor: float = 0.0
) -> PeakMemory:
    """Peak with `experts_held` expert records on the card at once: k, a layer's, or all of them."""
    return PeakMemory(
        non_experts=non_experts,
        experts=experts_held * model.expert_bytes(precision),
        kv=model.kv_bytes_per_token() * context,
        unpacked=2.0 * model.expert_weights if format_of(precision).bytes_per_weight < 1 else 0.0,
        predictor=predictor,
    )


def predictor_weights(model: ModelShape) -> int:
    """Parameters of one layer's predictor: path so far, popularity and affinity in, experts out (eqs. 4, 5)."""
    inputs = model.moe_layers * model.experts_per_token + model.experts + model.experts * model.experts_per_token
    widths = (inputs, *LAYER_WIDTHS, model.experts)
    return sum(wide * (narrow_to + 1) for wide, narrow_to in itertools.pairwise(widths))
