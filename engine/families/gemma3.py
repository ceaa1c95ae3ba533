"""Gemma 3, dense, without what reads pictures."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import GEMMA

FAMILY = Family(
    replies=GEMMA,
)
