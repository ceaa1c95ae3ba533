"""Mixtral."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router
from engine.families.gguf import ENDS, NORMS, ROTATED_ATTENTION, Gguf, Key, experts, routing
from engine.families.replies import MISTRAL

FAMILY = Family(
    replies=MISTRAL,
    packs_rows=True,
    fast_path=FastPath(
        model="MixtralForCausalLM",
        layer="MixtralDecoderLayer",
        attention="MixtralAttention",
        block="MixtralSparseMoeBlock",
        router=Router(normalise=True),
    ),
    gguf=Gguf(
        architecture="llama",
        when=lambda metadata: bool(metadata.get("llama.expert_count")),
        config={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "sliding_window": Key("attention.sliding_window", None),
        },
        fixed=routing(norm=True),
        tensors={
            **ENDS,
            **NORMS,
            **ROTATED_ATTENTION,
            **experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        },
    ),
    mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
