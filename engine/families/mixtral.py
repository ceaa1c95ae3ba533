"""Mixtral."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router
from engine.families.replies import MISTRAL

FAMILY = Family(
    replies=MISTRAL,
    packs_rows=True,
    fast_path=FastPath(
        model="MixtralForCausalLM",
        layer="MixtralDecoderLayer",
        attention="MixtralAttention",
        block="MixtralSparseMoeBlock",
        router=Router(normalise=True),
    ),
    mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
