"""NLLB-MoE: an encoder-decoder whose router chooses two experts for each token, as far as they have room."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

from engine.experts.dispatch import StandardExperts
from engine.runtime.adapters.switch_transformers import EncoderDecoderAdapter


class NllbExperts(StandardExperts):
    """Takes the router's choice as the family's block hands it over, and reads it as the library does.

    The library (5.24, checked by running it) takes the entries of the 0/1 mask for ids of experts: whatever was chosen,
    expert 1 computes the first choice and expert 0 the second.  A model trained as published wants
    `router_probs.topk(2)` instead; as long as ours are to be the library's answers, this is what they are.
    """

    moe_token_dropout: float
    """What was dropped in training is scaled away afterwards."""

    def forward(
        self, hidden_states: torch.Tensor, router_mask: torch.Tensor, router_probs: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], 0/1 [T, E] for the first choice, probabilities [T, E] of both choices -> [T, H]."""
        first = (router_probs * router_mask).sum(dim=-1)
        second = (router_probs * (1 - router_mask)).sum(dim=-1)
        weights = torch.stack([first, second], dim=-1) * (1 - self.moe_token_dropout)
        index = torch.tensor([1, 0], device=weights.device).expand(weights.shape)
        return super().forward(hidden_states, index, weights)


class NllbMoeAdapter(EncoderDecoderAdapter):
    """Standard experts in the place of a dictionary of modules."""

    expert_tensors: ClassVar[dict[str, str]] = {
        "fc1.weight": "up_proj",
        "fc1.bias": "up_proj_bias",
        "fc2.weight": "down_proj",
        "fc2.bias": "down_proj_bias",
    }

    def prepare(self, model: Any) -> None:
        for module in list(model.modules()):
            if isinstance(module, NllbMoeSparseMLP):
                first = module.experts["expert_0"]
                experts = NllbExperts(
                    module.num_experts,
                    first.fc1.in_features,
                    first.fc1.out_features,
                    first.act,
                    has_gate=False,
                    has_bias=True,
                )
                experts.moe_token_dropout = module.experts.moe_token_dropout
                module.experts = experts


ADAPTER = NllbMoeAdapter()
