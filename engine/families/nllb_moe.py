"""NLLB-MoE, an encoder-decoder of two experts per token."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(adapter="nllb_moe", experts_per_token=2)
