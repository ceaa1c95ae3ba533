"""DeepSeek-MoE (Dai et al. 2024): Llama's attention, routed experts beside shared ones, the first layers dense."""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP, Qwen2MoeTopKRouter

from engine.runtime.own.parts import OwnConfig, OwnForCausalLM, OwnLayer, OwnMoE, add, experts, stacked


@strict
class DeepseekConfig(OwnConfig):
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
        if self.scoring_func != "softmax":
            raise ValueError(f"experts are scored by {self.scoring_func!r}")


class DeepseekAttention(LlamaAttention):  # type: ignore[misc]  # the library is untyped
    """Llama's."""


class DeepseekMoE(OwnMoE):
    def __init__(self, config: DeepseekConfig) -> None:
        width, shared = config.moe_intermediate_size, config.n_shared_experts
        super().__init__(
            Qwen2MoeTopKRouter(config),
            experts(config, config.n_routed_experts or 0, width),
            Qwen2MoeMLP(config, width * shared) if shared else None,
        )


class DeepseekDecoderLayer(OwnLayer):
    def __init__(self, config: DeepseekConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = DeepseekAttention(config, layer_idx)
        if config.is_sparse(layer_idx):
            self.mlp = DeepseekMoE(config)


class DeepseekForCausalLM(OwnForCausalLM):
    config_class = DeepseekConfig
    layer = DeepseekDecoderLayer


add(
    DeepseekConfig,
    DeepseekForCausalLM,
    stacked("mlp.experts", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
)
