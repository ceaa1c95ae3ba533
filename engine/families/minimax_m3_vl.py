"""MiniMax M3: a gate like that of gpt-oss."""

from __future__ import annotations

from engine.families.family import ClampedGate, Family

FAMILY = Family(gate=ClampedGate("halves", "swiglu_limit", "swiglu_alpha"))
