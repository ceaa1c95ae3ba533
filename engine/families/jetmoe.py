"""JetMoE."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(adapter="jetmoe", packs_rows=True)
