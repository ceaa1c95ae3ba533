"""Tells the recording points of a loaded model which decoder layer each of them belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import HybridExperts
from engine.experts.recording import LAYER_NUMBER
from engine.experts.whole_layer import WholeLayerExperts
from engine.telemetry.lanes import layer_number


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of experts.

    Attributes:
        number: of its decoder layer.
        name: of its module.
        experts: how many.
        kernel: what computes them.
    """

    number: int
    name: str
    experts: int
    kernel: Any


def number_layers(model: Any) -> list[ExpertLayer]:
    """The expert layers of a model in its order; from now on what they record carries their numbers."""
    layers: list[ExpertLayer] = []
    taken: set[int] = set()
    for name, module in model.named_modules():
        bound = module.__dict__.get(BANK_LAYER)
        if bound is None:
            continue
        number = layer_number(name)
        if number < 0 or number in taken:  # an encoder's and a decoder's layers, say: told apart all the same
            number = max(taken, default=-1) + 1
        taken.add(number)
        setattr(module, LAYER_NUMBER, number)
        place, kernel = bound
        if isinstance(kernel, HybridExperts | WholeLayerExperts):
            kernel.number_in_model(number)
        layers.append(ExpertLayer(number, name, _experts_of(module, place, kernel), kernel))
    return layers


def _experts_of(module: Any, place: Any, kernel: Any) -> int:
    for owner in (module, kernel, place):
        count = getattr(owner, "num_experts", None)
        if isinstance(count, int):
            return count
    return 0
