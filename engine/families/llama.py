"""Llama, dense."""

from __future__ import annotations

from engine.families.family import Family, ShortWay

FAMILY = Family(
    packs_rows=True,
    short_way=ShortWay(
        model="LlamaForCausalLM",
        layer="LlamaDecoderLayer",
        attention="LlamaAttention",
    ),
)
