"""SmallThinker (Song et al. 2025): a layer's experts are chosen before its attention, by the layer's own input."""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch.nn.functional import linear
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention

from engine.runtime.own.parts import OwnConfig, OwnForCausalLM, OwnMoE, SideBySideLayer, add, experts, stacked


@strict
class SmallThinkerConfig(OwnConfig):
    model_type = "smallthinker"

    rope_layout: list[int] | None = None
    sliding_window_layout: list[int] | None = None
    sliding_window_size: int | None = 4096
    moe_num_primary_experts: int = 32
    moe_num_active_primary_experts: int = 4
    moe_ffn_hidden_size: int = 768
    moe_primary_router_apply_softmax: bool = False
    moe_enable_early_router: bool = True
    moe_enable_secondary_experts: bool = False
    moe_layer_layout: list[int] | None = None
    use_qk_norm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        layers = self.num_hidden_layers
        slides = self.sliding_window_layout or [0] * layers
        self.layer_types = ["sliding_attention" if each else "full_attention" for each in slides]
        self.sliding_window = self.sliding_window_size if any(slides) else None
        # As the library's attention calls them.
        self.no_rope_layers = self.rope_layout or [1] * layers
        self.use_sliding_window = self.sliding_window is not None
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        layouts = (self.no_rope_layers, self.layer_types, self.moe_layer_layout)
        if any(each is not None and len(each) != self.num_hidden_layers for each in layouts):
            raise ValueError("a layout is not of as many layers as the model")
        if self.use_qk_norm or self.moe_enable_secondary_experts or not self.moe_enable_early_router:
            raise ValueError("it has norms of queries, secondary experts, or a late router")
        if not all(self.moe_layer_layout or ()):
            raise ValueError("some of its layers have no experts")


class SmallThinkerRouter(torch.nn.Module):
    """Scores of the chosen experts alone, which sum to 1."""

    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__()
        self.top_k, self.is_softmax = config.moe_num_active_primary_experts, config.moe_primary_router_apply_softmax
        self.weight = torch.nn.Parameter(torch.empty(config.moe_num_primary_experts, config.hidden_size))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] -> router logits [T, E], weights [T, k], index [T, k]."""
        logits = linear(rows, self.weight)
        chosen, index = logits.float().topk(self.top_k, dim=-1)
        weights = chosen.softmax(-1) if self.is_softmax else chosen.sigmoid()
        return logits, (weights / weights.sum(-1, keepdim=True)).to(rows.dtype), index


class SmallThinkerMoeBlock(OwnMoE):
    """A router of one input, and experts of another."""

    router_name = "primary_router"


class SmallThinkerDecoderLayer(SideBySideLayer):
    """Only some layers rotate; those slide."""

    def __init__(self, config: SmallThinkerConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = SmolLM3Attention(config, layer_idx)
        own = experts(config, config.moe_num_primary_experts, config.moe_ffn_hidden_size, "relu")
        self.block_sparse_moe = SmallThinkerMoeBlock(SmallThinkerRouter(config), own)

    def behind(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = after + self.block_sparse_moe(self.post_attention_layernorm(after), before)
        return out


class SmallThinkerForCausalLM(OwnForCausalLM):
    config_class = SmallThinkerConfig
    layer = SmallThinkerDecoderLayer


_BLOCK = "block_sparse_moe.experts"
add(SmallThinkerConfig, SmallThinkerForCausalLM, stacked(_BLOCK, _BLOCK, "gate", "up", "down"))
