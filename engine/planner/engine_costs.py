"""What the engine's own kernels reach: the same factors as the published systems', measured instead of fitted."""

from __future__ import annotations

from engine.planner.costs import Costs
from engine.planner.efficiency import Efficiency
from engine.planner.machine import HardwareProfile, Origin
from engine.planner.model_shape import ModelShape
from engine.planner.precision import careful_precision

OF_DATA_SHEETS = Efficiency(arithmetic=0.35, card_memory=0.6, host_memory=0.56, operator_s=15e-6)
"""On a card as the library launches its operators; on the CPU as the native kernels read weights."""
OF_MEASUREMENTS = Efficiency(arithmetic=0.8, card_memory=0.9, host_memory=0.67, operator_s=15e-6)
"""Of what the machine was seen to reach with plain large reads and products (`bench decode` against it)."""
HOST_LAYER_S = 20e-6
"""A decoder layer of one token in the native kernels, beside what it reads: hand-overs to threads, norms, rotations."""


def engine_costs(machine: HardwareProfile, model: ModelShape, precision: str, threads: int | None = None) -> Costs:
    """Costs of this engine: on the CPU the dense weights are in the experts' precision too, on a card in 16 bits."""

    def measured(*names: str) -> Efficiency:
        found = all(machine.origins.get(name) is Origin.MEASURED for name in names)
        return OF_MEASUREMENTS if found else OF_DATA_SHEETS

    rates = ("cpu.flops", "gpu.flops") if machine.gpu is not None else ("cpu.flops",)
    efficiency = Efficiency(
        arithmetic=measured(*rates).arithmetic,
        card_memory=measured("gpu.bytes_per_s").card_memory,
        host_memory=measured("cpu.ram_bytes_per_s").host_memory,
        operator_s=OF_DATA_SHEETS.operator_s,
    )
    return Costs(
        machine,
        model,
        precision,
        threads=threads or 0,
        efficiency=efficiency,
        dense_precision=careful_precision(precision, model.total_weights),
        host_layer_s=HOST_LAYER_S,
        score_bytes=0.0,
    )
