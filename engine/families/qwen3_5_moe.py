"""Qwen3.5-MoE and Qwen3.6-MoE."""

from __future__ import annotations

from engine.families.family import BESIDE_THE_LAYERS, Family
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
    draft_head=BESIDE_THE_LAYERS,
)
