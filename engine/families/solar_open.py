"""Solar Open."""

from __future__ import annotations

from engine.families.family import GROUPED_SIGMOID, Family, FastPath

FAMILY = Family(
    packs_rows=True,
    fast_path=FastPath(
        model="SolarOpenForCausalLM",
        layer="SolarOpenDecoderLayer",
        attention="SolarOpenAttention",
        block="SolarOpenMoE",
        router=GROUPED_SIGMOID,
    ),
)
