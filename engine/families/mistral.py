"""Mistral, dense."""

from __future__ import annotations

from engine.families.family import Family, FastPath
from engine.families.replies import MISTRAL

FAMILY = Family(
    with_layer_types="ministral",
    replies=MISTRAL,
    packs_rows=True,
    fast_path=FastPath(
        model="MistralForCausalLM",
        layer="MistralDecoderLayer",
        attention="MistralAttention",
    ),
    mlx_experts={},
)
