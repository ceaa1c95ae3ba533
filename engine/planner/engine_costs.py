"""Costs of the engine's own kernels: the same factors as for published systems, measured instead of fitted."""

from __future__ import annotations

from engine.checkpoint.model_shape import ModelShape
from engine.formats import careful
from engine.hardware.machine import HardwareProfile, Origin
from engine.planner.costs import Costs, Dispatch, Efficiency

OF_DATA_SHEETS = Efficiency(arithmetic=0.35, card_memory=0.6, host_memory=0.56, operator_s=15e-6)
"""Relative to data sheets: on a card with the library's operators, on the CPU with the native kernels."""
OF_MEASUREMENTS = Efficiency(arithmetic=0.8, card_memory=0.9, host_memory=0.95, operator_s=15e-6)
"""Relative to the machine's measured bandwidth and product rate (checked with `bench decode`)."""
HOST_LAYER_S = 60e-6
"""A decoder layer of one token in the native kernels, without reading weights: two calls from Python, their hand-over
to threads, norms, rotations, attention.  Timed call by call on two cores of a Xeon with the starter's layers: 35, 29
and 25 microseconds around attention in bf16, int8 and int4; 28, 21 and 22 around router and experts; and some in
between."""
DISPATCH = Dispatch(layer_s=60e-6, card_s=30e-6, host_s=30e-6)
"""Estimated as four, two and two operators (`OF_DATA_SHEETS.operator_s`); never timed on a real card."""
DISPATCH_EMULATED = Dispatch(240e-6, 250e-6, 250e-6, host_expert_s=25e-6, host_rate=0.85, seen_card_expert_s=250e-6)
"""For an emulated card, whose streams are threads that have to be woken.  `engine.bench.strategies` on two cores of a
Xeon, with the starter and two layers of Qwen3-30B-A3B's shape in bf16 and int4: 205 to 272, 185 to 330, 236 to 313
microseconds.  Next to a card, the CPU kernels get each expert as a separate row: that is the cost per expert, and why
experts are read more slowly than in one call for all of them.  The engine times single experts on the card: 48 to 480
microseconds more than an expert takes in a group."""


def engine_costs(machine: HardwareProfile, model: ModelShape, precision: str, threads: int | None = None) -> Costs:
    """Costs of this engine, with dense weights in the experts' precision or close to it."""

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
    is_emulated = machine.gpu is not None and machine.gpu.name.startswith("emulated")
    dense = careful(precision, model.total_weights)
    return Costs(
        machine,
        model,
        precision,
        threads=threads or 0,
        efficiency=efficiency,
        dense_precision=dense,
        card_dense_precision=dense,
        host_layer_s=HOST_LAYER_S,
        dispatch=DISPATCH_EMULATED if is_emulated else DISPATCH,
        score_bytes=0.0,
    )
