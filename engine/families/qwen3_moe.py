"""Qwen3-MoE."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router
from engine.families.gguf import ATTENTION, ENDS, NORMS, Gguf, experts, routing
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
    packs_rows=True,
    fast_path=FastPath(
        model="Qwen3MoeForCausalLM",
        layer="Qwen3MoeDecoderLayer",
        attention="Qwen3MoeAttention",
        block="Qwen3MoeSparseMoeBlock",
        router=Router(normalise="norm_topk_prob", bf16_shares=True),
    ),
    gguf=Gguf(
        architecture="qwen3moe",
        config={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        constants={
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        },
        fixed=routing(norm=True),
        tensors={**ENDS, **NORMS, **ATTENTION, **experts()},
    ),
    mlx_experts={},
)
