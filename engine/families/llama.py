"""Llama, dense."""

from __future__ import annotations

from engine.families.family import Family, FastPath
from engine.families.gguf import ENDS, FEED_FORWARD, NORMS, ROTATED_ATTENTION, Gguf
from engine.families.replies import LLAMA

FAMILY = Family(
    replies=LLAMA,
    packs_rows=True,
    fast_path=FastPath(
        model="LlamaForCausalLM",
        layer="LlamaDecoderLayer",
        attention="LlamaAttention",
    ),
    gguf=Gguf(
        architecture="llama",
        when=lambda metadata: not metadata.get("llama.expert_count"),
        tensors={**ENDS, **NORMS, **ROTATED_ATTENTION, **FEED_FORWARD},
    ),
    mlx_experts={},
)
