"""HY V4: a SwiGLU that clamps."""

from __future__ import annotations

from engine.families.family import ClampedGate, Family

FAMILY = Family(gate=ClampedGate("halves", "swiglu_limit"))
