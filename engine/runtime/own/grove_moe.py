"""GroveMoE (Wu et al. 2025): groups of experts share a small adjugate expert, computed once for each group chosen."""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from engine.runtime.own.parts import OwnConfig, OwnForCausalLM, OwnLayer, OwnMoE, add, experts, stacked


@strict
class GroveMoeConfig(OwnConfig):
    """As published; the last three are in the code of the model's makers."""

    model_type = "grove_moe"

    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    num_experts_per_group: int = 2
    parallel_expert_intermediate_size: int = 128
    parallel_expert_scale: float = 0.05

    def is_sparse(self, layer: int) -> bool:
        dense = layer in (self.mlp_only_layers or ())
        return not dense and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0

    def validate_architecture(self) -> None:
        if self.num_experts_per_group < 1 or self.num_experts % self.num_experts_per_group:
            raise ValueError(f"{self.num_experts} experts are in groups of {self.num_experts_per_group}")


class GroveMoeGroups(torch.nn.Module):
    """The groups' experts, out of reach of what asks a router beside experts early: it would mean others."""

    def __init__(self, config: GroveMoeConfig) -> None:
        super().__init__()
        self.per_group, self.count = config.num_experts_per_group, config.num_experts // config.num_experts_per_group
        self.experts = experts(config, self.count, config.parallel_expert_intermediate_size)

    def forward(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] with their experts [T, k] and weights -> [T, H]."""
        out: torch.Tensor = self.experts(rows, *_once(index // self.per_group, weights, self.count))
        return out


class GroveMoeSparseMoeBlock(OwnMoE):
    def __init__(self, config: GroveMoeConfig) -> None:
        super().__init__(Qwen2MoeTopKRouter(config), experts(config, config.num_experts, config.moe_intermediate_size))
        self.scale, self.groups = config.parallel_expert_scale, GroveMoeGroups(config)

    def routed(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().routed(rows, index, weights) + self.scale * self.groups(rows, index, weights)
        return out


def _once(groups: torch.Tensor, weights: torch.Tensor, nothing: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups [T, k] with their weights: one that several experts of a token are in has the sum, once.

    Args:
        nothing: an id of none.
    """
    same = groups[:, :, None] == groups[:, None, :]
    places = torch.arange(groups.shape[1], device=groups.device)
    first = same.int().argmax(-1) == places
    together = (same * weights[:, None, :]).sum(-1).to(weights.dtype)
    return torch.where(first, groups, nothing), together * first


class GroveMoeDecoderLayer(OwnLayer):
    def __init__(self, config: GroveMoeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = Qwen3MoeAttention(config, layer_idx)
        if config.is_sparse(layer_idx):
            self.mlp = GroveMoeSparseMoeBlock(config)


class GroveMoeForCausalLM(OwnForCausalLM):
    config_class = GroveMoeConfig
    layer = GroveMoeDecoderLayer
    _keys_to_ignore_on_load_unexpected = (r"\.expert_bias$",)  # published, and used by nobody


_NAMES = ("gate_proj", "up_proj", "down_proj")
add(
    GroveMoeConfig,
    GroveMoeForCausalLM,
    [
        *stacked("mlp.experts", "mlp.experts", *_NAMES),
        *stacked("mlp.chunk_experts", "mlp.groups.experts", *_NAMES),
    ],
)
