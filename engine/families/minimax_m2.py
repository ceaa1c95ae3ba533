"""MiniMax M2."""

from __future__ import annotations

from engine.families.family import Family, Router, fast_path
from engine.families.gguf import ATTENTION, ENDS, LAYER, NORMS, SIGMOID, Gguf, experts, routing
from engine.families.replies import MINIMAX

FAMILY = Family(
    replies=MINIMAX,
    packs_rows=True,
    fast_path=fast_path(
        "MiniMaxM2",
        norms_all_heads=True,
        block="SparseMoeBlock",
        router=Router(scoring="sigmoid", correction="e_score_correction_bias", normalise=True),
    ),
    gguf=Gguf(
        architecture="minimax-m2",
        partial_rotary=True,
        config={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        constants={"router_jitter_noise": 0.0},
        fixed=routing(norm=True, gating=SIGMOID),
        tensors={
            **ENDS,
            **NORMS,
            **ATTENTION,
            **experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
            f"{LAYER}.block_sparse_moe.e_score_correction_bias": "blk.{n}.exp_probs_b.bias",
        },
    ),
    mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
