"""Llama, dense."""

from __future__ import annotations

from engine.families.family import Family, FastPath
from engine.families.replies import LLAMA

FAMILY = Family(
    replies=LLAMA,
    packs_rows=True,
    fast_path=FastPath(
        model="LlamaForCausalLM",
        layer="LlamaDecoderLayer",
        attention="LlamaAttention",
    ),
    mlx_experts={},
)
