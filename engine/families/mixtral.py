"""Mixtral."""

from __future__ import annotations

from engine.families.family import Family, Router, ShortWay

FAMILY = Family(
    packs_rows=True,
    short_way=ShortWay(
        model="MixtralForCausalLM",
        layer="MixtralDecoderLayer",
        attention="MixtralAttention",
        block="MixtralSparseMoeBlock",
        router=Router(normalise=True),
    ),
)
