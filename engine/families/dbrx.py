"""DBRX."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(
    adapter="dbrx",
    packs_rows=True,
)
