"""Recording points of expert layers: the only place that all of them pass, whoever computes them."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch

from engine.kernels.interface import ExpertKernel
from engine.telemetry.lanes import CPU_EXPERTS, DENSE, EXPERTS
from engine.telemetry.recorder import RECORDER

LAYER_NUMBER = "_switchyard_layer_number"
"""Attribute of an experts module: the number of its decoder layer, for a timeline."""

FEW_TOKENS = 8
"""Steps of more want nearly all experts, which says nothing about which are wanted often."""


def recorded_experts(
    module: Any, kernel: ExpertKernel, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What `kernel` makes of it, with its spans.

    A kernel with `records_itself` also has spans of its own for what it does where.
    """
    recorder = RECORDER
    begun_ns = perf_counter_ns()
    recorder.layer = module.__dict__.get(LAYER_NUMBER, -1)
    if recorder.request:  # else this is a trial run while loading, and nothing of it began when the last one ended
        recorder.dense(DENSE, recorder.layer_since_ns, begun_ns, recorder.layer)
    try:
        result = kernel(hidden, index, weights)
        if not getattr(kernel, "records_itself", False):
            record_cpu_experts(begun_ns, index)
    finally:
        recorder.layer_since_ns = perf_counter_ns()
    return result


def record_cpu_experts(begun_ns: int, index: torch.Tensor) -> None:
    """The CPU has computed the experts `index` [T, k], all of them from RAM."""
    recorder = RECORDER
    few = len(index) <= FEW_TOKENS
    chosen = index.flatten().tolist() if few else []
    recorder.span(CPU_EXPERTS, EXPERTS, begun_ns, perf_counter_ns(), count=len(chosen) if few else index.numel())
    recorder.on_cpu += len(chosen)
    if few and recorder.uses is not None:
        recorder.uses.append((recorder.step, recorder.layer, chosen, ()))
