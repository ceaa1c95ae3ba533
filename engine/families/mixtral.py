"""Mixtral."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router

FAMILY = Family(
    packs_rows=True,
    fast_path=FastPath(
        model="MixtralForCausalLM",
        layer="MixtralDecoderLayer",
        attention="MixtralAttention",
        block="MixtralSparseMoeBlock",
        router=Router(normalise=True),
    ),
)
