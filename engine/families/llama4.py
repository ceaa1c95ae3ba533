"""Llama 4, with or without what reads pictures."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(adapter="llama4")
