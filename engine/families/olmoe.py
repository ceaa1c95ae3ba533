"""OLMoE."""

from __future__ import annotations

from engine.families.family import Family, Router, ShortWay

FAMILY = Family(
    packs_rows=True,
    short_way=ShortWay(
        model="OlmoeForCausalLM",
        layer="OlmoeDecoderLayer",
        attention="OlmoeAttention",
        norms_all_heads=True,
        block="OlmoeSparseMoeBlock",
        router=Router(normalise="norm_topk_prob", bf16_shares=True),
    ),
)
