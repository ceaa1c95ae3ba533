"""Switch Transformers, an encoder-decoder of one expert per token."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(adapter="switch_transformers", experts_per_token=1)
