"""GLM-4.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import GROUPED_SIGMOID, DraftHead, Family, fast_path
from engine.families.gguf import (
    ATTENTION,
    ENDS,
    FEED_FORWARD,
    LAYER,
    NORMS,
    SIGMOID,
    File,
    Gguf,
    Key,
    both,
    experts,
    scale_of_weights,
    shared_expert,
)
from engine.families.replies import HERMES


def _computed(file: File, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "routed_scaling_factor": scale_of_weights(file),
        "use_qk_norm": file.has("blk.0.attn_q_norm.weight"),
    }


FAMILY = Family(
    replies=HERMES,
    packs_rows=True,
    fast_path=fast_path("Glm4Moe", "MoE", GROUPED_SIGMOID),
    draft_head=DraftHead(),
    gguf=Gguf(
        architecture="glm4moe",
        partial_rotary=True,
        config={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "n_shared_experts": "expert_shared_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "first_k_dense_replace": Key("leading_dense_block_count", 0),
            "norm_topk_prob": Key("expert_weights_norm", False),
            "n_group": Key("expert_group_count", 1),
            "topk_group": Key("expert_group_used_count", 1),
        },
        fixed={"expert_gating_func": SIGMOID},
        computed=_computed,
        tensors={
            **ENDS,
            **NORMS,
            **both(f"{LAYER}.post_attention_layernorm", "blk.{n}.post_attention_norm"),
            **ATTENTION,
            **FEED_FORWARD,
            **experts(),
            **shared_expert("mlp.shared_experts"),
            f"{LAYER}.mlp.gate.e_score_correction_bias": "blk.{n}.exp_probs_b.bias",
        },
    ),
    mlx_experts={},
)
