"""Solar Open."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router

FAMILY = Family(
    packs_rows=True,
    fast_path=FastPath(
        model="SolarOpenForCausalLM",
        layer="SolarOpenDecoderLayer",
        attention="SolarOpenAttention",
        block="SolarOpenMoE",
        router=Router(
            scoring="sigmoid",
            correction="e_score_correction_bias",
            groups=("num_group", "topk_group"),
            bf16_logits=False,
            normalise="norm_topk_prob",
            scale="routed_scaling_factor",
        ),
    ),
)
