"""DeepSeek-V4: a SwiGLU that clamps, and attention with one head."""

from __future__ import annotations

from engine.families.family import ClampedGate, Family, KvNumbers
from engine.families.replies import DEEPSEEK

FAMILY = Family(
    replies=DEEPSEEK,
    gate=ClampedGate("halves", "limit"),
    kv=KvNumbers(keys_are_values=True),
)
