"""Mistral 4."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import MISTRAL

FAMILY = Family(replies=MISTRAL, packs_rows=True)
