"""Costs of the engine's own kernels: the same factors as for published systems, measured instead of fitted."""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.model_shape import ModelShape
from engine.formats import careful
from engine.hardware.machine import CallProfile, GpuProfile, HardwareProfile, Origin
from engine.planner.costs import Costs, DecodeSteps, Dispatch, Efficiency, Launches

OF_DATA_SHEETS = Efficiency(arithmetic=0.35, card_memory=0.6, host_memory=0.56, operator_s=15e-6)
"""Relative to data sheets: on a card with the library's operators, on the CPU with the native kernels."""
OF_MEASUREMENTS = Efficiency(arithmetic=0.8, card_memory=0.9, host_memory=0.95, operator_s=15e-6)
"""Relative to the machine's measured bandwidth and product rate (checked with `bench decode`)."""
HOST_LAYER_S = 60e-6
"""A decoder layer of one token in the native kernels, without reading weights: two calls from Python, their hand-over
to threads, norms, rotations, attention.  Timed call by call on two cores of a Xeon with the starter's layers: 35, 29
and 25 microseconds around attention in bf16, int8 and int4; 28, 21 and 22 around router and experts; and some in
between.  Where a native call has been timed, that decides."""
LAYER_CALLS, TOKEN_CALLS = 3.0, 11.0
"""A layer, and what a token takes beside its layers (embedding, angles, head, choice of the next one), in native calls
that compute next to nothing.  On two cores of an EPYC (Zen 5) such a call took 4 microseconds, a layer of a model that
lies in the second-level cache 12, and a token 43."""
STEP_SHARE = 0.9
"""Of the bandwidth of the expert kernels in a loop, at which a step reads that also computes everything else (the EPYC,
models of real shapes: 0.75 to 1.1).  The longer `HOST_LAYER_S` of an untimed machine already contains it."""
DISPATCH = Dispatch(layer_s=60e-6, card_s=30e-6, host_s=30e-6)
"""Estimated as four, two and two operators (`OF_DATA_SHEETS.operator_s`); never timed on a real card."""
STEP_LAUNCHES = Launches(layer=7, experts=2, token=14)
"""Counted by `tests/engine/test_card_launches.py`: two products, two norms, rotation, attention and router; products of
experts; at most 14 for the embedding, angles, the last norm and the head: 5 where one kernel finds the angles."""
GRAPH_OPERATOR_S = 2.8e-6
"""A kernel after another one in a graph, and its first reads: as in `engine/kernels/cuda/step_time.py`."""
FLAGS_S = 10e-6
"""Two flags a layer over the link, each seen by who waits for it, and the row and outputs that go with them: an
assumption."""
EXCHANGE_LAYER, EXCHANGE_TOKEN = 2, 2
"""Launches of `exchange.cu`, more: `post` and `join` of a layer, `begin` and `finish` of a token."""
EXCHANGE = Dispatch(layer_s=FLAGS_S + EXCHANGE_LAYER * GRAPH_OPERATOR_S, by_flags=True)
_AMD, _WITHOUT_GRAPHS = ("amd", "radeon"), ("intel", "apple")
DISPATCH_EMULATED = Dispatch(
    330e-6, 250e-6, 250e-6, host_expert_s=25e-6, host_rate=0.85, card_call_s=15e-6, seen_card_expert_s=250e-6
)
"""For an emulated card, whose streams are threads that have to be woken.  `benchmarks.strategies` on two cores of a
Xeon, with the starter and two layers of Qwen3-30B-A3B's shape in bf16 and int4: 205 to 272, 185 to 330, 236 to 313
microseconds, and about 90 for a router.  Next to a card, the CPU kernels get each expert as a separate row: that is the
cost per expert, and why experts are read more slowly than in one call for all of them.  The engine times single experts
on the card: 48 to 480 microseconds more than an expert takes in a group.  Where these calls have been timed, that
decides."""


CACHED_GAIN = 1.6
"""How much faster than from RAM weights are read that lie in the processor's cache: hardly, where something else pushes
them out, and more than twice where nothing else runs
(experts of 512 x 256 in 16 bits on an EPYC: 25 and 58 GB/s; one thread with 13 MB of int8: 2.3 times)."""


def engine_costs(
    machine: HardwareProfile, model: ModelShape, precision: str, threads: int | None = None, *, captures: bool = True
) -> Costs:
    """Costs of this engine, with dense weights in the experts' precision or close to it.

    Args:
        captures: whether a card's decode steps may be captured as graphs.
    """

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
    calls = machine.calls
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
        host_layer_s=LAYER_CALLS * calls.native_s or HOST_LAYER_S,
        host_token_s=TOKEN_CALLS * calls.native_s,
        native_card=is_emulated,
        dispatch=_dispatch(calls, is_emulated=is_emulated),
        step_share=STEP_SHARE if calls.native_s else 1.0,
        cached_share=min(1.0, machine.cpu.cache_bytes / max(_bytes_read(model, precision, dense), 1.0)),
        cached_gain=CACHED_GAIN,
        score_bytes=0.0,
        steps=None if machine.gpu is None or is_emulated else _steps(machine.gpu, captures=captures),
    )


def _steps(gpu: GpuProfile, *, captures: bool) -> DecodeSteps:
    """Of NVIDIA's cards each may ask the CPU for experts from within a graph, if it is the only one."""
    name = gpu.name.lower()
    if not captures or any(maker in name for maker in _WITHOUT_GRAPHS):
        return DecodeSteps(STEP_LAUNCHES)
    if gpu.count > 1 or any(maker in name for maker in _AMD):
        return DecodeSteps(STEP_LAUNCHES, GRAPH_OPERATOR_S)
    return DecodeSteps(STEP_LAUNCHES, GRAPH_OPERATOR_S, EXCHANGE, EXCHANGE_TOKEN)


def _bytes_read(model: ModelShape, precision: str, dense: str) -> float:
    """Of all weights that some token reads: one row of the embedding is not worth counting."""
    each = model.layer_bytes_per_weight(dense)
    layers = each * model.matrix_weights
    head = model.head_bytes_per_weight(dense) * model.vocabulary * model.hidden
    return layers + head + model.all_expert_bytes(precision)


def _dispatch(calls: CallProfile, *, is_emulated: bool) -> Dispatch:
    usual = DISPATCH_EMULATED if is_emulated else DISPATCH
    if not calls.layer_s:
        return usual
    return replace(
        usual,
        layer_s=calls.layer_s + (calls.router_s if is_emulated else 0.0),
        card_s=calls.card_s,
        host_s=calls.host_s,
        host_expert_s=calls.host_expert_s,
        card_call_s=calls.single_s,
        seen_card_expert_s=calls.single_s,
    )
