"""Gemma 4, without what reads pictures and sound."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import GEMMA

FAMILY = Family(
    replies=GEMMA,
)
