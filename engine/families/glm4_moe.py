"""GLM-4.5."""

from __future__ import annotations

from engine.families.family import DraftHead, Family
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
    packs_rows=True,
    draft_head=DraftHead(),
    mlx_experts={},
)
