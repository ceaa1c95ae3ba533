"""Llama 4: the router's score scales the *input* of an expert, and the library runs every expert on every token."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from engine.experts.dispatch import StandardExperts
from engine.runtime.adapters import Adapter

if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    # transformers 5.24 reads this of what the text model returns, and it has none.
    MoeCausalLMOutputWithPast.image_outputs = None


class Llama4Moe(Llama4TextMoe):  # type: ignore[misc]  # the library is untyped
    """The family's block, running only the experts that were chosen: the others' input is zero, and so their output."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S, H] -> [B * S, H] and the router's logits [B * S, E]."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        scores, router_logits = self.router(hidden_states)
        weights, index = scores.topk(self.top_k, dim=1)
        # Each choice is a token of its own, as it has an input of its own.
        scaled = (hidden_states[:, None] * weights[..., None]).flatten(0, 1)
        routed = self.experts(scaled, index.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1))
        out = self.shared_expert(hidden_states)
        out += routed if self.top_k == 1 else routed.view(*index.shape, -1).sum(dim=1)
        return out, router_logits


class Llama4Adapter(Adapter):
    def prepare(self, model: Any) -> None:
        for module in list(model.modules()):
            if isinstance(module, Llama4TextMoe):
                own: Any = module.experts
                module.experts = StandardExperts(
                    own.num_experts, own.hidden_size, own.intermediate_size, own.act_fn, is_transposed=True
                )
                module.__class__ = Llama4Moe
