"""dots.llm1."""

from __future__ import annotations

from engine.families.family import GROUPED_SIGMOID, Family, FastPath

FAMILY = Family(
    packs_rows=True,
    fast_path=FastPath(
        model="Dots1ForCausalLM",
        layer="Dots1DecoderLayer",
        attention="Dots1Attention",
        block="Dots1MoE",
        router=GROUPED_SIGMOID,
    ),
)
