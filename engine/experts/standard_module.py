"""An experts module in the standard layout, with which adapters replace modules that do not support the interface."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.integrations.moe import _default_apply_gate

from engine.experts.dispatch import experts_forward


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
