"""Qwen3-Next."""

from __future__ import annotations

from engine.families.family import BESIDE_THE_LAYERS, Family
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
    draft_head=BESIDE_THE_LAYERS,
)
