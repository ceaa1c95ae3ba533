"""Qwen3, dense."""

from __future__ import annotations

from engine.families.family import Family, ShortWay

FAMILY = Family(
    packs_rows=True,
    short_way=ShortWay(
        model="Qwen3ForCausalLM",
        layer="Qwen3DecoderLayer",
        attention="Qwen3Attention",
    ),
)
