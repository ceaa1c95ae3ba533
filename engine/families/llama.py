"""Llama, dense."""

from __future__ import annotations

from engine.families.family import Family, FastPath

FAMILY = Family(
    packs_rows=True,
    fast_path=FastPath(
        model="LlamaForCausalLM",
        layer="LlamaDecoderLayer",
        attention="LlamaAttention",
    ),
)
