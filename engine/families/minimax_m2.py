"""MiniMax M2."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import MINIMAX

FAMILY = Family(
    replies=MINIMAX,
    packs_rows=True,
    mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
