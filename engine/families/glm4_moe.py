"""GLM-4.5."""

from __future__ import annotations

from engine.families.family import GROUPED_SIGMOID, DraftHead, Family, fast_path
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
    packs_rows=True,
    fast_path=fast_path("Glm4Moe", "MoE", GROUPED_SIGMOID),
    draft_head=DraftHead(),
    mlx_experts={},
)
