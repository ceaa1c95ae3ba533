"""Granite, MoE."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.gguf import Gguf
from engine.families.gguf.granite import CONFIG, FIXED, TENSORS, multipliers
from engine.families.replies import GRANITE

FAMILY = Family(
    replies=GRANITE,
    packs_rows=True,
    gguf=Gguf(
        architecture="granitemoe",
        when=lambda metadata: not metadata.get("granitemoe.expert_shared_feed_forward_length"),
        config=CONFIG,
        fixed=FIXED,
        computed=multipliers,
        tensors=TENSORS,
    ),
)
