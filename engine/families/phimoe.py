"""Phi-3.5-MoE."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(
    rotates_again=True,
    mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
