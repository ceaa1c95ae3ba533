"""Qwen3-MoE."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router
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
    mlx_experts={},
)
