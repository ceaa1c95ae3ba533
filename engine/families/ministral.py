"""Ministral, dense; and Mistral where its layers differ in their attention."""

from __future__ import annotations

from engine.families.family import Family, FastPath
from engine.families.replies import MISTRAL

FAMILY = Family(
    replies=MISTRAL,
    packs_rows=True,
    fast_path=FastPath(
        model="MinistralForCausalLM",
        layer="MinistralDecoderLayer",
        attention="MinistralAttention",
    ),
    mlx_experts={},
)
