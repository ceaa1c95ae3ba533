"""MiniMax M2."""

from __future__ import annotations

from engine.families.family import Family, Router, fast_path
from engine.families.replies import MINIMAX

FAMILY = Family(
    replies=MINIMAX,
    packs_rows=True,
    fast_path=fast_path(
        "MiniMaxM2",
        norms_all_heads=True,
        block="SparseMoeBlock",
        router=Router(scoring="sigmoid", correction="e_score_correction_bias", normalise=True),
    ),
    mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
