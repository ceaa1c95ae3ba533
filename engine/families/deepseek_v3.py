"""DeepSeek-V3 and R1."""

from __future__ import annotations

from engine.families.family import GROUPED_SIGMOID, DraftHead, Family, FastPath
from engine.families.replies import DEEPSEEK

FAMILY = Family(
    replies=DEEPSEEK,
    packs_rows=True,
    fast_path=FastPath(
        model="DeepseekV3ForCausalLM",
        layer="DeepseekV3DecoderLayer",
        attention="DeepseekV3Attention",
        is_latent=True,
        block="DeepseekV3MoE",
        router=GROUPED_SIGMOID,
    ),
    draft_head=DraftHead(),
)
