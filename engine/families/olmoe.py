"""OLMoE."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router

FAMILY = Family(
    packs_rows=True,
    fast_path=FastPath(
        model="OlmoeForCausalLM",
        layer="OlmoeDecoderLayer",
        attention="OlmoeAttention",
        norms_all_heads=True,
        block="OlmoeSparseMoeBlock",
        router=Router(normalise="norm_topk_prob", bf16_shares=True),
    ),
    mlx_experts={},
)
