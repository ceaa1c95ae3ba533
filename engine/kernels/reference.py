"""The definition of expert computation in plain torch: every fast path is tested against this.

It follows transformers' experts interface (`transformers.integrations.moe`), honouring its attributes. Weights are the
module's own stacked parameters.
"""

from __future__ import annotations

from typing import Any

import torch


def reference_experts(
    module: Any,
    weights: dict[str, torch.Tensor],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of each token's experts, token by token, summed in fp32.

    Args:
        module: has the attributes of the interface (`has_gate`, `has_bias`, `is_transposed`, ...).
        weights: the parameters by name, in the module's layout: `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I],
            or both with the last two dimensions swapped if `module.is_transposed`; `up_proj` in place of `gate_up_proj`
            if not `module.has_gate`; `*_bias` if `module.has_bias`.
        hidden_states: [T, H].
        top_k_index, top_k_weights: [T, k]; an invalid id contributes nothing.

    Returns:
        [T, H], of the type of `hidden_states`.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    result = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for token in range(hidden_states.shape[0]):
        for choice in range(top_k_index.shape[1]):
            expert = int(top_k_index[token, choice])
            if not 0 <= expert < module.num_experts:
                continue
            inner = _linear(module, weights, first, expert, hidden_states[token])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            out = _linear(module, weights, "down_proj", expert, inner)
            if module.has_post_expert_norm:
                out = module.post_expert_norm(out)
            result[token] += out.float() * top_k_weights[token, choice].float()
    return result.to(hidden_states.dtype)


def _linear(
    module: Any, weights: dict[str, torch.Tensor], name: str, expert: int, vector: torch.Tensor
) -> torch.Tensor:
    matrix = weights[name][expert]
    out = vector @ (matrix if module.is_transposed else matrix.T)
    return out + weights[f"{name}_bias"][expert] if module.has_bias else out
