"""LongCat-Flash: besides its experts the router can choose "zero" experts, which hand a token through as it is."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import WeightRenaming
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

from engine.experts.dispatch import StandardExperts
from engine.runtime.adapters import Adapter


class LongcatExperts(StandardExperts):
    """Real experts from the bank; the ids above theirs are zero experts."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, k], [T, k] -> [T, H]."""
        routed = super().forward(hidden_states, top_k_index, top_k_weights)
        kept = (top_k_weights * (top_k_index >= self.num_experts)).sum(dim=-1, keepdim=True)
        return routed + (hidden_states * kept).to(routed.dtype)


class LongcatFlashAdapter(Adapter):
    """`LongcatExperts` in the place of the family's own, which would keep rows of gate_up_proj for zero experts."""

    def prepare(self, model: Any) -> None:
        for module in list(model.modules()):
            if isinstance(module, LongcatFlashMoE):
                own: Any = module.experts
                module.experts = LongcatExperts(
                    own.num_routed_experts, own.hidden_size, own.intermediate_size, own.act_fn
                )

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:
        """Rows that the library saves for zero experts, and never uses, get the name of a module that is not there."""
        config = model.config
        zero = range(config.n_routed_experts, config.n_routed_experts + (config.zero_expert_num or 0))
        if not zero:
            return library
        numbers = "|".join(map(str, zero))
        return [WeightRenaming(rf"mlp\.experts\.({numbers})\.", r"mlp.zero_experts.\1."), *library]
