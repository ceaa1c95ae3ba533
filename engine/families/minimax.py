"""MiniMax-01: a forward over several tokens is not exact on top of an earlier state."""

from __future__ import annotations

from engine.families.family import Family

FAMILY = Family(continues=False)
