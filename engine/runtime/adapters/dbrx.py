"""DBRX: the experts' matrices lie below one another in three tall ones, w1 and v1 (gate and up) and w2 (down)."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter
from transformers.models.dbrx.modeling_dbrx import DbrxFFN

from engine.experts.dispatch import StandardExperts
from engine.runtime.adapters import Adapter


class DbrxExperts(StandardExperts):
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[B, S, H], [B * S, k], [B * S, k] -> [B, S, H]."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return super().forward(flat, top_k_index, top_k_weights).view(hidden_states.shape)


class TallMatrices(WeightConverter):  # type: ignore[misc]  # the library is untyped
    """Its sources hold all experts, [E * I, H], and are read as [E, I, H]."""

    experts_below_one_another = True


class DbrxAdapter(Adapter):
    def prepare(self, model: Any) -> None:
        for module in list(model.modules()):
            if isinstance(module, DbrxFFN):
                own: Any = module.experts
                module.experts = DbrxExperts(
                    own.num_experts, own.hidden_size, own.ffn_hidden_size, own.mlp.activation_fn
                )

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - of the interface
        return [
            *library,
            TallMatrices(
                ["ffn.experts.mlp.w1", "ffn.experts.mlp.v1"], "ffn.experts.gate_up_proj", [Concatenate(dim=1)]
            ),
            TallMatrices("ffn.experts.mlp.w2", "ffn.experts.down_proj", [Transpose(dim0=1, dim1=2)]),
        ]
