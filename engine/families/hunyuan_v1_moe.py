"""HunYuan."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(
    packs_rows=True,
)
