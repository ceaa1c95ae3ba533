"""What the engine's own kernels reach: the same factors as the published systems', measured instead of fitted."""

from __future__ import annotations

from engine.planner.costs import Costs
from engine.planner.efficiency import Efficiency
from engine.planner.machine import HardwareProfile
from engine.planner.model_shape import ModelShape
from engine.planner.precision import careful_precision

ENGINE = Efficiency(arithmetic=0.35, card_memory=0.6, host_memory=0.67, operator_s=15e-6)
"""On a card as the library launches its operators; on the CPU as the native kernels read weights (`bench decode`)."""
HOST_LAYER_S = 20e-6
"""A decoder layer of one token in the native kernels, beside what it reads: hand-overs to threads, norms, rotations."""
LIBRARY_LAYER_S = 210e-6
"""The same through the library's modules, where the native way does not know the family."""


def engine_costs(machine: HardwareProfile, model: ModelShape, precision: str, threads: int | None = None) -> Costs:
    """Costs of this engine: on the CPU the dense weights are in the experts' precision too, on a card in 16 bits."""
    return Costs(
        machine,
        model,
        precision,
        threads=threads or 0,
        efficiency=ENGINE,
        dense_precision=careful_precision(precision, model.total_weights),
        host_layer_s=HOST_LAYER_S,
    )
