"""LFM2-MoE: short convolutions and attention."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import LFM

FAMILY = Family(
    replies=LFM,
)
