"""Recording points of expert layers: the one place that all of them go through, whatever computes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from engine.common import clock
from engine.kernels.interface import ExpertKernel, is_capturable
from engine.telemetry.lanes import CPU_EXPERTS, DENSE, EXPERTS
from engine.telemetry.recorder import RECORDER, DeviceWork

LAYER_NUMBER = "_switchyard_layer_number"
"""Attribute of an experts module: the number of its decoder layer, for the timeline."""

FEW_TOKENS = 8
"""Steps with more tokens use nearly all experts, which says nothing about popularity."""


def recorded_experts(
    module: Any,
    kernel: ExpertKernel,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    place: torch.device,
) -> torch.Tensor:
    """Calls `kernel` and records its spans.

    A kernel with `records_itself` records its own spans, and reports its submissions to `RECORDER.queued`, if set.

    Args:
        place: where the dense part of the layer is.
    """
    recorder, queued = RECORDER, RECORDER.queued
    records_itself = getattr(kernel, "records_itself", False)
    begun: DeviceWork | None = None
    begun_ns = clock.now_ns()
    recorder.layer = module.__dict__.get(LAYER_NUMBER, -1)
    if recorder.request:  # otherwise a trial run while loading, for which `layer_since_ns` is meaningless
        if queued is None:
            name, layer, count = recorder.named(DENSE, recorder.layer)
            recorder.dense(name, recorder.since_ns, begun_ns, layer, count)
        elif not records_itself or hidden.device != place:
            begun = queued.experts_begin(place)
    try:
        result = kernel(hidden, index, weights)
        if queued is not None and begun is not None and (hidden.device.type != "cpu" or is_capturable(kernel)):
            queued.experts_done(begun, place, index.numel())
            if len(index) <= FEW_TOKENS and recorder.uses is not None:  # waits for the device
                record_uses(index.flatten().tolist())
        elif not records_itself:
            _record_cpu_experts(begun_ns, index)
    finally:
        recorder.layer_since_ns = clock.now_ns()
        if queued is not None:
            queued.experts_end(place)
    return result


def _record_cpu_experts(begun_ns: int, index: torch.Tensor) -> None:
    """The CPU has computed the experts `index` [T, k], all of them from RAM."""
    recorder = RECORDER
    recorder.span(CPU_EXPERTS, EXPERTS, begun_ns, clock.now_ns(), count=index.numel())
    if len(index) <= FEW_TOKENS:
        recorder.on_cpu += index.numel()
        record_uses(index.flatten().tolist())
    else:
        recorder.many_on_cpu += index.numel()


def record_uses(experts: Sequence[int], hits: Iterable[int] = ()) -> None:
    """Records the experts that the current layer uses in a decode step, for the expert map.

    Args:
        hits: those of them that were already where they are computed; none for a layer without tiers.
    """
    recorder = RECORDER
    if recorder.uses is not None:
        recorder.uses.append((recorder.step, recorder.layer, experts, tuple(hits)))
