"""DeepSeek-MoE (Dai et al. 2024): Llama's attention, routed experts beside shared ones, the first layers dense."""

from __future__ import annotations

from typing import ClassVar

import torch
from huggingface_hub.dataclasses import strict
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP, Qwen2MoeTopKRouter

from engine.runtime.own.parts import OwnConfig, OwnForCausalLM, OwnLayer, add, experts, stacked


@strict
class DeepseekConfig(OwnConfig):
    """As published."""

    model_type = "deepseek"
    attribute_map: ClassVar[dict[str, str]] = {"num_experts": "n_routed_experts"}

    moe_intermediate_size: int = 1407
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts: a dense model has none."""
        return bool(self.n_routed_experts) and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def validate_architecture(self) -> None:
        """Part of what `strict` validates."""
        if self.scoring_func != "softmax":
            raise ValueError(f"experts are scored by {self.scoring_func!r}")


class DeepseekAttention(LlamaAttention):  # type: ignore[misc]  # the library is untyped
    """Llama's."""


class DeepseekMoE(torch.nn.Module):
    """Routed experts, and shared ones in one."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.gate = Qwen2MoeTopKRouter(config)
        self.experts = experts(config, config.n_routed_experts or 0, config.moe_intermediate_size)
        shared = config.n_shared_experts
        self.shared_experts = Qwen2MoeMLP(config, config.moe_intermediate_size * shared) if shared else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(rows)
        out: torch.Tensor = self.experts(rows, index, weights).view(hidden_states.shape)
        return out if self.shared_experts is None else out + self.shared_experts(hidden_states)


class DeepseekDecoderLayer(OwnLayer):
    """The first layers are dense."""

    def __init__(self, config: DeepseekConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = DeepseekAttention(config, layer_idx)
        if config.is_sparse(layer_idx):
            self.mlp = DeepseekMoE(config)


class DeepseekForCausalLM(OwnForCausalLM):
    """With a head."""

    config_class = DeepseekConfig
    layer = DeepseekDecoderLayer


add(
    DeepseekConfig,
    DeepseekForCausalLM,
    stacked("mlp.experts", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
)
