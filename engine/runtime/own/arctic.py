"""Snowflake Arctic: a dense layer and experts side by side; the experts see what attention saw."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from engine.runtime.own.parts import OwnConfig, OwnForCausalLM, OwnLayer, add, experts, stacked


@strict
class ArcticConfig(OwnConfig):
    """As published."""

    model_type = "arctic"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "num_local_experts"}

    rms_norm_eps: float = 1e-5
    num_local_experts: int = 8
    num_experts_per_tok: int = 1
    moe_layer_frequency: int = 2
    parallel_attn_mlp_res: bool = False


class ArcticMLP(torch.nn.Module):
    """Gated."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = (torch.nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(width, hidden, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        out: torch.Tensor = self.w2(silu(self.w1(hidden_states)) * self.w3(hidden_states))
        return out


class ArcticMoE(torch.nn.Module):
    """Mixtral's experts."""

    def __init__(self, config: ArcticConfig) -> None:
        super().__init__()
        self.gate = MixtralTopKRouter(config)
        self.experts = experts(config, config.num_local_experts, config.intermediate_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(rows)
        out: torch.Tensor = self.experts(rows, index, weights.to(rows.dtype))
        return out.view(hidden_states.shape)


class ArcticBlock(torch.nn.Module):
    """What a layer without experts has."""

    def __init__(self, config: ArcticConfig) -> None:
        super().__init__()
        self.mlp = ArcticMLP(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        out: torch.Tensor = self.mlp(hidden_states)
        return out


class ArcticDecoderLayer(OwnLayer):
    """Attention and a dense block, one after the other, with experts beside both."""

    def __init__(self, config: ArcticConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.mlp
        is_sparse = (layer_idx + 1) % config.moe_layer_frequency == 0
        self.self_attn = LlamaAttention(config, layer_idx)
        self.block_sparse_moe = ArcticMoE(config) if is_sparse else ArcticBlock(config)
        self.is_parallel = is_sparse and config.parallel_attn_mlp_res
        if self.is_parallel:
            self.residual_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.residual_mlp = ArcticMLP(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        after = hidden_states + attended
        beside = hidden_states if self.is_parallel else after
        if self.is_parallel:
            after = after + self.residual_mlp(self.residual_layernorm(after))
        out: torch.Tensor = after + self.block_sparse_moe(self.post_attention_layernorm(beside))
        return out


class ArcticForCausalLM(OwnForCausalLM):
    """With a head."""

    config_class = ArcticConfig
    layer = ArcticDecoderLayer


_BLOCK = "block_sparse_moe.experts"
add(ArcticConfig, ArcticForCausalLM, stacked(_BLOCK, _BLOCK, "w1", "w3", "w2"))
