"""DeepSeek-V2."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router
from engine.families.replies import DEEPSEEK

FAMILY = Family(
    replies=DEEPSEEK,
    packs_rows=True,
    fast_path=FastPath(
        model="DeepseekV2ForCausalLM",
        layer="DeepseekV2DecoderLayer",
        attention="DeepseekV2Attention",
        is_latent=True,
        angles="complex",
        block="DeepseekV2Moe",
        router=Router(
            groups=("num_group", "topk_group"),
            groups_if=("topk_method", "group_limited_greedy"),
            bf16_logits=False,
            scale="routed_scaling_factor",
        ),
    ),
)
