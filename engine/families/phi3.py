"""Phi-3."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(
    rotates_again=True,
)
