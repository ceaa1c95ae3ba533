"""Qwen1.5-MoE and Qwen2-MoE."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router
from engine.families.replies import QWEN2

FAMILY = Family(
    replies=QWEN2,
    packs_rows=True,
    fast_path=FastPath(
        model="Qwen2MoeForCausalLM",
        layer="Qwen2MoeDecoderLayer",
        attention="Qwen2MoeAttention",
        block="Qwen2MoeSparseMoeBlock",
        router=Router(normalise="norm_topk_prob", bf16_shares=True),
    ),
    mlx_experts={},
)
