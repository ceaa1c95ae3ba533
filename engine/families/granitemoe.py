"""Granite, MoE."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import GRANITE

FAMILY = Family(
    replies=GRANITE,
    packs_rows=True,
)
