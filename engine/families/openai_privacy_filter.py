"""OpenAI Privacy Filter: a gate like that of gpt-oss."""

from __future__ import annotations

from engine.families.family import ClampedGate, Family

FAMILY = Family(gate=ClampedGate("halves", "limit", "alpha"))
