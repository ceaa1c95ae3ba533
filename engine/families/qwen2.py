"""Qwen2 and Qwen2.5, dense."""

from __future__ import annotations

from engine.families.family import Family, FastPath
from engine.families.replies import QWEN2

FAMILY = Family(
    replies=QWEN2,
    packs_rows=True,
    fast_path=FastPath(
        model="Qwen2ForCausalLM",
        layer="Qwen2DecoderLayer",
        attention="Qwen2Attention",
    ),
    mlx_experts={},
)
