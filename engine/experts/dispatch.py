"""The one function that computes experts: registered with transformers' experts interface, served from the bank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.experts.recording import recorded_experts
from engine.telemetry.recorder import RECORDER

if TYPE_CHECKING:
    from engine.experts.bank import BankLayer
    from engine.kernels.interface import ExpertKernel

IMPLEMENTATION = "switchyard"
"""Our name among the library's experts implementations."""

ExpertsForward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""As `experts_forward`."""


class _Interruption(threading.local):
    handler: ExpertsForward | None = None


_interruption = _Interruption()

BANK_LAYER = "_switchyard_bank_layer"
"""Attribute of an experts module: its (BankLayer, kernel)."""


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Args:
        module: the experts module, bound to the bank.
        hidden_states: [T, H].
        top_k_index: [T, k]; ids at or above the number of experts contribute nothing.
        top_k_weights: [T, k].

    Returns:
        [T, H], of the type and on the device of `hidden_states`.

    Raises:
        EngineError: `INTERNAL`, if the module is not bound.
    """
    if _interruption.handler is not None:
        return _interruption.handler(module, hidden_states, top_k_index, top_k_weights)
    return compute_experts(module, hidden_states, top_k_index, top_k_weights)


def compute_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`experts_forward`, whoever is interrupted by experts."""
    layer, kernel = _bound(module)
    device, place = layer.device, hidden_states.device
    if place != device:
        # The experts are in RAM, the rest of the model on the GPU: only activations travel.
        hidden_states, top_k_index, top_k_weights = (
            tensor.to(device) for tensor in (hidden_states, top_k_index, top_k_weights)
        )
    if RECORDER.on:
        result = recorded_experts(module, kernel, hidden_states, top_k_index, top_k_weights, place)
    else:
        result = kernel(hidden_states, top_k_index, top_k_weights)
    return result if place == device else result.to(place)


@contextmanager
def interrupted_by_experts(handler: ExpertsForward) -> Iterator[None]:
    """While this thread is in it, `handler` is called in place of `experts_forward`: whoever captures a model's steps
    has to stop there, for which experts are wanted decides what is done."""
    before, _interruption.handler = _interruption.handler, handler
    try:
        yield
    finally:
        _interruption.handler = before


def bound_kernel(module: Any) -> tuple[BankLayer, ExpertKernel]:
    """The records and the kernel of an experts module, as they are bound now.

    Raises:
        EngineError: `INTERNAL`, if there are none.
    """
    return _bound(module)


def bank_layer(module: Any) -> BankLayer:
    """The records of an experts module that computes by itself (see `engine.runtime.adapters`)."""
    return _bound(module)[0]


def _bound(module: Any) -> tuple[BankLayer, ExpertKernel]:
    try:
        return cast("tuple[BankLayer, ExpertKernel]", module._switchyard_bank_layer)
    except AttributeError:
        raise EngineError(
            ErrorCode.INTERNAL, f"An experts module ({type(module).__name__}) is not bound to the expert bank."
        ) from None
