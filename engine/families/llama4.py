"""Llama 4, with or without what reads pictures."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.replies import LLAMA

FAMILY = Family(
    replies=LLAMA,
    adapter="llama4",
)
