"""Step 3.7; step3p5 is its language model."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(adapter="step3p7", packs_rows=True)
