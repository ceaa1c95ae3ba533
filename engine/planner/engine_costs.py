"""What the engine's own kernels reach: the same factors as the published systems', measured instead of fitted."""

from __future__ import annotations

from engine.checkpoint.model_shape import ModelShape
from engine.formats import careful
from engine.hardware.machine import HardwareProfile, Origin
from engine.planner.costs import Costs, Dispatch, Efficiency

OF_DATA_SHEETS = Efficiency(arithmetic=0.35, card_memory=0.6, host_memory=0.56, operator_s=15e-6)
"""On a card as the library launches its operators; on the CPU as the native kernels read weights."""
OF_MEASUREMENTS = Efficiency(arithmetic=0.8, card_memory=0.9, host_memory=0.95, operator_s=15e-6)
"""Of what the machine was seen to reach with plain large reads and products (`bench decode` against it)."""
HOST_LAYER_S = 60e-6
"""A decoder layer of one token in the native kernels, beside what it reads: two calls from Python, their hand-overs to
threads, norms, rotations, attention.  Of the starter's layers, timed call by call on two cores of a Xeon: 35, 29 and
25 microseconds around attention in bf16, int8 and int4, 28, 21 and 22 around router and experts, and some between."""
DISPATCH = Dispatch(layer_s=60e-6, card_s=30e-6, host_s=30e-6)
"""Counted in operators (`OF_DATA_SHEETS.operator_s`), four and two and two: on a real card it was never timed."""
DISPATCH_EMULATED = Dispatch(240e-6, 250e-6, 250e-6, host_expert_s=25e-6, host_rate=0.85, seen_card_expert_s=250e-6)
"""Of an emulated card, whose streams are threads that have to be woken: `engine.bench.strategies` on two cores of a
Xeon, the starter and two layers of Qwen3-30B-A3B's shape in bf16 and int4, 205 to 272, 185 to 330, 236 to 313
microseconds.  Beside a card the CPU's kernels are given each expert as a row of its own: that is what an expert costs
there more, and why it is read slower than where one call serves them all.  The engine times single ones on the card:
48 to 480 microseconds above what one of many takes."""


def engine_costs(machine: HardwareProfile, model: ModelShape, precision: str, threads: int | None = None) -> Costs:
    """Costs of this engine, whose dense weights are in the precision of the experts, or nearly."""

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
