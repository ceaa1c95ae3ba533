"""GLM-4.5V: its language model."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import HERMES

FAMILY = Family(replies=HERMES, packs_rows=True)
