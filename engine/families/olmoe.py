"""OLMoE."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router
from engine.families.gguf import ATTENTION, ENDS, NORMS, Gguf, Key, experts, routing

FAMILY = Family(
    packs_rows=True,
    fast_path=FastPath(
        model="OlmoeForCausalLM",
        layer="OlmoeDecoderLayer",
        attention="OlmoeAttention",
        norms_all_heads=True,
        block="OlmoeSparseMoeBlock",
        router=Router(normalise="norm_topk_prob", bf16_shares=True),
    ),
    gguf=Gguf(
        architecture="olmoe",
        config={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "clip_qkv": Key("attention.clamp_kqv", None),
        },
        constants={"norm_topk_prob": False},
        fixed=routing(norm=False),
        tensors={**ENDS, **NORMS, **ATTENTION, **experts()},
    ),
    mlx_experts={},
)
