"""Encoder-decoders: Switch Transformers, whose router chooses one expert, or none once that has its fill, and NLLB-MoE,
whose router chooses two for each token, as far as they have room."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from engine.experts.dispatch import StandardExperts
from engine.runtime.adapters import Adapter


class EncoderDecoderAdapter(Adapter):
    """Builds the family's text-to-text class and stacks its experts.

    `expert_tensors`: name within an expert (`wi.weight`) -> part (`up_proj`).
    """

    expert_tensors: ClassVar[dict[str, str]]

    def model_class(self, config: Any) -> type | None:
        chosen: type = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)]
        return chosen

    def conversions(self, model: Any, library: list[Any]) -> list[Any]:  # noqa: ARG002 - of the interface
        stacked = [
            WeightConverter(f"experts.expert_*.{name}", f"experts.{part}", [MergeModulelist(dim=0)])
            for name, part in self.expert_tensors.items()
        ]
        return [*library, *stacked]


class SwitchExperts(StandardExperts):
    def forward(
        self, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], one-hot [T, 1, E] (all zero for a token that its expert had no room for), [T, 1] -> [T, H]."""
        chosen = selected_experts.argmax(dim=-1)
        index = chosen.masked_fill(selected_experts.sum(dim=-1) == 0, self.num_experts)
        return super().forward(hidden_states, index, routing_weights)


class SwitchTransformersAdapter(EncoderDecoderAdapter):
    expert_tensors: ClassVar[dict[str, str]] = {"wi.weight": "up_proj", "wo.weight": "down_proj"}

    def prepare(self, model: Any) -> None:
        config = model.config
        for module in list(model.modules()):
            if isinstance(module, SwitchTransformersSparseMLP):
                act_fn = module.experts["expert_0"].act
                module.experts = SwitchExperts(config.num_experts, config.d_model, config.d_ff, act_fn, has_gate=False)
                module._is_hf_initialized = True  # the library's initialisation looks for the dictionary


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
