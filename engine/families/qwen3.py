"""Qwen3, dense."""

from __future__ import annotations

from engine.families.family import Family, FastPath
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
    packs_rows=True,
    fast_path=FastPath(
        model="Qwen3ForCausalLM",
        layer="Qwen3DecoderLayer",
        attention="Qwen3Attention",
    ),
    mlx_experts={},
)
