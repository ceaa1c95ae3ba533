"""K2 Horizon (IFM): norms over groups, gated attention, and in larger models experts of attention's values (MoVA)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch.nn.functional import linear, silu, softplus
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeMLP

from engine.runtime.own.parts import OwnConfig, OwnForCausalLM, OwnLayer, OwnMoE, add, experts, stacked


@strict
class K2HorizonConfig(OwnConfig):
    model_type = "k2_horizon"

    use_sliding_window: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    query_key_norm: bool = True
    moe_gate_bias: bool = False
    layernorm_num_groups: int = 1
    num_shared_experts: int = 0
    router_score_func: str = "softmax"
    router_scaling_factor: float | int | None = 1.0
    rope_head_dim: int | None = None
    attention_gate_func: str | None = None
    mova_num_experts: int = 0
    mova_num_experts_per_tok: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        self.sliding_window = self.sliding_window if self.use_sliding_window else None
        if self.sliding_window and not self.layer_types:
            self.layer_types = ["sliding_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    def is_sparse(self, layer: int) -> bool:
        dense = layer in (self.mlp_only_layers or ())
        return not dense and self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0

    def validate_architecture(self) -> None:
        if self.rope_head_dim not in (None, self.head_dim):
            raise ValueError(f"{self.rope_head_dim} of a head's {self.head_dim} dimensions are rotated")
        if self.attention_gate_func not in (None, "silu", "softplus"):
            raise ValueError(f"attention is gated by {self.attention_gate_func!r}")
        if self.router_score_func not in ("softmax", "sigmoid"):
            raise ValueError(f"experts are scored by {self.router_score_func!r}")


class K2HorizonRMSNorm(torch.nn.Module):
    """Each of some groups of dimensions has a norm of its own."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        parts = hidden_states.float().view(*hidden_states.shape[:-1], self.groups, -1)
        scaled = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.eps)
        out: torch.Tensor = self.weight * scaled.flatten(-2)
        return out.to(hidden_states.dtype)


def _norm(config: K2HorizonConfig) -> K2HorizonRMSNorm:
    return K2HorizonRMSNorm(config.hidden_size, config.layernorm_num_groups, config.rms_norm_eps)


class K2HorizonRouter(torch.nn.Module):
    """The bias is added for the choice only."""

    def __init__(self, config: K2HorizonConfig, count: int, chosen: int, *, normalises: bool) -> None:
        super().__init__()
        self.top_k, self.normalises = chosen, normalises
        self.is_softmax = config.router_score_func == "softmax"
        self.scale = config.router_scaling_factor or 1.0
        self.weight = torch.nn.Parameter(torch.empty(count, config.hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(count)) if config.moe_gate_bias else None

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H] -> router logits [T, E], weights [T, k], index [T, k]."""
        logits = linear(rows, self.weight)
        scores = logits.float().softmax(-1) if self.is_softmax else logits.float().sigmoid()
        index = (scores if self.bias is None else scores + self.bias.float()).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, index)
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, (weights * self.scale).to(rows.dtype), index


def _moe(config: K2HorizonConfig) -> OwnMoE:
    width, shared = config.moe_intermediate_size, config.num_shared_experts
    return OwnMoE(
        K2HorizonRouter(config, config.num_experts, config.num_experts_per_tok, normalises=config.norm_topk_prob),
        experts(config, config.num_experts, width),
        Qwen2MoeMLP(config, width * shared) if shared else None,
    )


class K2HorizonAttention(LlamaAttention):  # type: ignore[misc]  # the library is untyped
    """Attention whose result is gated, and whose values may be a mixture of experts'."""

    def __init__(self, config: K2HorizonConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        of_heads, of_keys = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        heads, keys = of_heads * self.head_dim, of_keys * self.head_dim
        self.sliding_window = config.sliding_window
        self.gate_func = config.attention_gate_func
        if self.gate_func:
            self.gate_proj = torch.nn.Linear(config.hidden_size, heads, bias=False)
        self.has_norms = config.query_key_norm
        if self.has_norms:
            self.q_norm = K2HorizonRMSNorm(heads, of_heads, config.rms_norm_eps)
            self.k_norm = K2HorizonRMSNorm(keys, of_keys, config.rms_norm_eps)
        if config.mova_num_experts and config.is_sparse(layer_idx):
            del self.v_proj
            chosen = config.mova_num_experts_per_tok
            self.v_router = K2HorizonRouter(config, config.mova_num_experts, chosen, normalises=chosen > 1)
            self.v_experts = torch.nn.ModuleList(
                torch.nn.Linear(config.hidden_size, keys, bias=False) for _ in range(config.mova_num_experts)
            )

    def values(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, D], D being the width of all key-value heads."""
        if hasattr(self, "v_proj"):
            found: torch.Tensor = self.v_proj(hidden_states)
            return found
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.v_router(rows)
        # They stay with the rest of the model, in the types of their file: each reads only the rows that chose it.
        mixed = torch.zeros(len(rows), self.k_proj.out_features, dtype=rows.dtype, device=rows.device)
        for expert in index.unique().tolist():
            row, place = (index == expert).nonzero(as_tuple=True)
            own = silu(self.v_experts[expert](rows[row])) * weights[row, place, None]
            mixed.index_add_(0, row, own.to(mixed.dtype))
        return mixed.view(*hidden_states.shape[:2], -1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """[B, S, H] -> [B, S, H], and the weights if the implementation gives them."""
        places = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries, keys = self.q_proj(hidden_states), self.k_proj(hidden_states)
        if self.has_norms:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        values = self.values(hidden_states)
        queries, keys, values = (each.view(places).transpose(1, 2) for each in (queries, keys, values))
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx, kwargs=kwargs)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attended, shares = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        attended = attended.reshape(*hidden_states.shape[:-1], -1)
        if self.gate_func:
            gate = self.gate_proj(hidden_states)
            attended = attended * (silu(gate) if self.gate_func == "silu" else softplus(gate, beta=math.log(2)))
        return self.o_proj(attended), shares


class K2HorizonDecoderLayer(OwnLayer):
    def __init__(self, config: K2HorizonConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = K2HorizonAttention(config, layer_idx)
        if config.is_sparse(layer_idx):
            self.mlp = _moe(config)
        self.input_layernorm, self.post_attention_layernorm = _norm(config), _norm(config)


class K2HorizonForCausalLM(OwnForCausalLM):
    config_class = K2HorizonConfig
    layer = K2HorizonDecoderLayer
    norm = staticmethod(_norm)
    rotary = LlamaRotaryEmbedding


add(
    K2HorizonConfig,
    K2HorizonForCausalLM,
    stacked("mlp.experts", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
)
