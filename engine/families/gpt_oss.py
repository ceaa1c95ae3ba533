"""gpt-oss: sinks (a logit per head of attending to nothing), norms that round once, and a gate of its own."""

from __future__ import annotations

from engine.families.family import ClampedGate, Family, FastPath, Router
from engine.families.replies import HARMONY

FAMILY = Family(
    replies=HARMONY,
    packs_rows=True,
    fast_path=FastPath(
        model="GptOssForCausalLM",
        layer="GptOssDecoderLayer",
        attention="GptOssAttention",
        angles="once",
        block="GptOssMLP",
        # A softmax over the chosen logits is one over all of them, made to sum to 1.
        router=Router(bias="bias", normalise=True, bf16_shares=True),
    ),
    gate=ClampedGate("alternating", "limit", "alpha"),
)
