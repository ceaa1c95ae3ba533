"""SmolLM3, dense."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
)
