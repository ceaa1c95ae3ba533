"""Qwen3-Omni: its thinker."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(adapter="qwen3_omni_moe")
