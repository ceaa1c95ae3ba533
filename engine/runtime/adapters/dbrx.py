"""DBRX: the experts' matrices lie below one another in three tall ones, w1 and v1 (gate and up) and w2 (down)."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter
from transformers.models.dbrx.modeling_dbrx import DbrxFFN

from engine.experts.standard_module import StandardExperts
from engine.runtime.adapters.base import Adapter


class DbrxExperts(StandardExperts):
    """Takes the tokens as the family's block hands them over."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[B, S, H], [B * S, k], [B * S, k] -> [B, S, H]."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return super().forward(flat, top_k_index, top_k_weights).view(hidden_states.shape)


class CutIntoExperts(ConversionOps):  # type: ignore[misc]  # the library is untyped
    """[E * I, H] -> [E, I, H], or [E, H, I] if `transposed`."""

    def __init__(self, *, transposed: bool = False) -> None:
        self.transposed = transposed

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],  # noqa: ARG002 - of the interface
        target_patterns: list[str],
        config: Any = None,
        **kwargs: Any,  # noqa: ARG002 - of the interface
    ) -> dict[str, torch.Tensor]:
        """Keeps the source patterns while there are several of them, as the library's own operations do."""
        made = {}
        for pattern, (tensor,) in input_dict.items():
            experts = tensor.view(-1, config.ffn_config.ffn_hidden_size, tensor.shape[-1])
            made[pattern if len(input_dict) > 1 else target_patterns[0]] = experts.mT if self.transposed else experts
        return made


class TallMatrices(WeightConverter):  # type: ignore[misc]  # the library is untyped
    """Its sources hold all experts, one below the other in the first dimension."""

    stacks_experts = True


class DbrxAdapter(Adapter):
    """Standard experts in the place of the family's own."""

    def prepare(self, model: Any) -> None:
        """See `FamilyAdapter`."""
        for module in list(model.modules()):
            if isinstance(module, DbrxFFN):
                own: Any = module.experts
                module.experts = DbrxExperts(
                    own.num_experts, own.hidden_size, own.ffn_hidden_size, own.mlp.activation_fn
                )

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - of the interface
        """See `FamilyAdapter`."""
        return [
            *library,
            TallMatrices(
                ["ffn.experts.mlp.w1", "ffn.experts.mlp.v1"],
                "ffn.experts.gate_up_proj",
                [CutIntoExperts(), Concatenate(dim=1)],
            ),
            TallMatrices("ffn.experts.mlp.w2", "ffn.experts.down_proj", [CutIntoExperts(transposed=True)]),
        ]


ADAPTER = DbrxAdapter()
