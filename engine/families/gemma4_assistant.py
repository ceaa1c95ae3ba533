"""The small model that guesses ahead for Gemma 4."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(refused="only guesses ahead for a Gemma 4 model: open that model instead")
