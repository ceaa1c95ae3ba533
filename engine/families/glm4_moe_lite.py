"""GLM-4.7 Flash: DeepSeek-V3's attention and experts under names of its own."""

from __future__ import annotations

from engine.families.family import GROUPED_SIGMOID, DraftHead, Family, FastPath
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
    packs_rows=True,
    fast_path=FastPath(
        model="Glm4MoeLiteForCausalLM",
        layer="Glm4MoeLiteDecoderLayer",
        attention="Glm4MoeLiteAttention",
        is_latent=True,
        block="Glm4MoeLiteMoE",
        router=GROUPED_SIGMOID,
    ),
    draft_head=DraftHead(),
)
