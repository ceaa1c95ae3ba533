"""The small model that drafts tokens for Gemma 4."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(refused="only drafts tokens for a Gemma 4 model: open that model instead")
