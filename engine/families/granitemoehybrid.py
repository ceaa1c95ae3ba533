"""Granite 4.0: Mamba-2 and attention, with experts or dense."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import GRANITE

FAMILY = Family(
    replies=GRANITE,
)
