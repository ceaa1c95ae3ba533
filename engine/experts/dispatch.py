"""The entry point for all expert computation: registered with transformers' experts interface, backed by the bank.

`StandardExperts` is a module in the standard layout, with which adapters replace modules that lack the interface.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.integrations.moe import _default_apply_gate

from engine.common.errors import EngineError, ErrorCode
from engine.experts.executor import recorded_experts
from engine.telemetry.recorder import RECORDER

if TYPE_CHECKING:
    from engine.kernels.interface import ExpertKernel, LayerRecords

IMPLEMENTATION = "switchyard"
"""Our name in the library's registry of experts implementations."""

ExpertsForward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Same signature as `experts_forward`."""


class _Interruption(threading.local):
    handler: ExpertsForward | None = None


_interruption = _Interruption()

BANK_LAYER = "_switchyard_bank_layer"
"""Attribute of an experts module that holds its (LayerRecords, kernel)."""


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
        [T, H], with the dtype and device of `hidden_states`.

    Raises:
        EngineError: `INTERNAL`, the module is not bound.
    """
    if _interruption.handler is not None:
        return _interruption.handler(module, hidden_states, top_k_index, top_k_weights)
    return compute_experts(module, hidden_states, top_k_index, top_k_weights)


def compute_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """`experts_forward`, ignoring `interrupted_by_experts`."""
    layer, kernel = bound_kernel(module)
    device, place = layer.device, hidden_states.device
    if place != device:
        # The experts are in RAM, the rest of the model on the GPU: only activations are copied.
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
    """Calls `handler` instead of `experts_forward` on this thread.

    Graph capture has to break at the experts, because the work to do depends on the routing.
    """
    before, _interruption.handler = _interruption.handler, handler
    try:
        yield
    finally:
        _interruption.handler = before


def bound_kernel(module: Any) -> tuple[LayerRecords, ExpertKernel]:
    """The records and the kernel that an experts module is currently bound to.

    Raises:
        EngineError: `INTERNAL`, the module is not bound.
    """
    try:
        return cast("tuple[LayerRecords, ExpertKernel]", module._switchyard_bank_layer)
    except AttributeError:
        raise EngineError(
            ErrorCode.INTERNAL, f"An experts module ({type(module).__name__}) is not bound to the expert bank."
        ) from None


def bank_layer(module: Any) -> LayerRecords:
    """The records of an experts module with its own forward (see `engine.runtime.adapters`)."""
    return bound_kernel(module)[0]


class StandardExperts(torch.nn.Module):
    """Gated or plain MLP experts in the library's standard layout, computed by `experts_forward`.

    Args:
        num_experts: E.
        hidden: H, width of input and output.
        intermediate: I.
        act_fn: the activation, elementwise.
        has_gate: whether an expert is `down(act(gate(x)) * up(x))` rather than `down(act(up(x)))`.
        has_bias: whether its matrices have biases.
        is_transposed: whether the checkpoint has the matrices as [in, out] rather than [out, in].
    """

    _apply_gate = _default_apply_gate  # the library's default, by which kernels recognise that they can fuse it

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        *,
        has_gate: bool = True,
        has_bias: bool = False,
        is_transposed: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.has_gate, self.has_bias = has_gate, has_bias
        self.is_transposed = is_transposed
        self.has_post_expert_norm = False
        self.act_fn = act_fn
        first, width = ("gate_up_proj", 2 * intermediate) if has_gate else ("up_proj", intermediate)
        matrices = {first: (width, hidden), "down_proj": (hidden, intermediate)}
        shapes: dict[str, tuple[int, ...]] = {
            name: (inputs, outputs) if is_transposed else (outputs, inputs)
            for name, (outputs, inputs) in matrices.items()
        }
        if has_bias:
            shapes |= {f"{first}_bias": (width,), "down_proj_bias": (hidden,)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(num_experts, *shape), requires_grad=False))
        self.expert_parts = tuple(shapes)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, k], [T, k] -> [T, H]."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
