"""Snowflake Arctic: a dense layer and experts side by side; the experts see what attention saw."""

from __future__ import annotations

from typing import ClassVar

import torch
from huggingface_hub.dataclasses import strict
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeMLP
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from engine.runtime.own.parts import OwnConfig, OwnForCausalLM, OwnMoE, SideBySideLayer, add, experts, stacked


@strict
class ArcticConfig(OwnConfig):
    model_type = "arctic"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}

    rms_norm_eps: float = 1e-5
    num_local_experts: int = 8
    num_experts_per_tok: int = 1
    moe_layer_frequency: int = 2
    parallel_attn_mlp_res: bool = False


class ArcticBlock(torch.nn.Module):
    """What a layer without experts has."""

    def __init__(self, config: ArcticConfig) -> None:
        super().__init__()
        self.mlp = Lfm2MoeMLP(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(hidden_states)
        return out


class ArcticDecoderLayer(SideBySideLayer):
    """Attention and a dense block, one after the other, with experts beside both."""

    def __init__(self, config: ArcticConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        is_sparse = (layer_idx + 1) % config.moe_layer_frequency == 0
        self.self_attn = LlamaAttention(config, layer_idx)
        self.block_sparse_moe: torch.nn.Module = ArcticBlock(config)
        if is_sparse:
            own = experts(config, config.num_local_experts, config.intermediate_size)
            self.block_sparse_moe = OwnMoE(MixtralTopKRouter(config), own)
        self.is_parallel = is_sparse and config.parallel_attn_mlp_res
        if self.is_parallel:
            self.residual_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.residual_mlp = Lfm2MoeMLP(config, config.hidden_size)

    def behind(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        beside = before if self.is_parallel else after
        if self.is_parallel:
            after = after + self.residual_mlp(self.residual_layernorm(after))
        out: torch.Tensor = after + self.block_sparse_moe(self.post_attention_layernorm(beside))
        return out


class ArcticForCausalLM(OwnForCausalLM):
    config_class = ArcticConfig
    layer = ArcticDecoderLayer


_BLOCK = "block_sparse_moe.experts"
add(ArcticConfig, ArcticForCausalLM, stacked(_BLOCK, _BLOCK, "w1", "w3", "w2"))
