"""Kimi Linear and Ling 3: linear attention with a gate per channel (KDA), between layers of latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ENDS,
    EXPERTS,
    LAYER,
    LOCAL_EXPERTS,
    NORMS,
    OWN_WIDTH,
    SIGMOID,
    File,
    Gguf,
    Key,
    Made,
    Tensors,
    correction,
    ends,
    experts,
    feed_forward,
    layer,
    per_layer,
    scaled,
    shared_expert,
    which_are_sparse,
)
from engine.families.gguf.deepseek import LATENT, RANKS, latent

KDA: Tensors = {
    **layer(
        {
            "k_proj": "attn_k",
            "v_proj": "attn_v",
            "f_a_proj": "ssm_f_a",
            "f_b_proj": "ssm_f_b",
            "b_proj": "ssm_beta",
            "g_a_proj": "ssm_g_a",
            "g_b_proj": "ssm_g_b",
            "o_norm": "ssm_norm",
        },
        "self_attn",
    ),
    **layer({f"{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"}, "self_attn", "convolution"),
    f"{LAYER}.self_attn.dt_bias": "blk.{n}.ssm_dt.bias",
    f"{LAYER}.self_attn.A_log": Made("logarithm_of_heads", "blk.{n}.ssm_a"),
}

_LINGS: Tensors = {
    **LATENT,
    **KDA,
    f"{LAYER}.self_attn.f_proj.weight": "blk.{n}.ssm_f_a.weight",
    f"{LAYER}.self_attn.g_proj.weight": ("blk.{n}.ssm_g_a.weight", "blk.{n}.attn_gate.weight"),
    f"{LAYER}.self_attn.A_log": Made("logarithm", "blk.{n}.ssm_a"),
}
"""The two projections of gates are one."""


def _kinds(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = per_layer(file, "attention.head_count_kv", config)
    return {
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "linear_num_heads": config["num_attention_heads"],
    }


ROWS = (
    Gguf(
        architecture="kimi-linear",
        model_type="kimi_linear",
        head_dim="rope.dimension_count",
        layered=True,
        config={
            **LOCAL_EXPERTS,
            **OWN_WIDTH,
            **RANKS,
            "n_shared_experts": Key("expert_shared_count", 0),
            "n_group": Key("expert_group_count", 1),
            "topk_group": Key("expert_group_used_count", 1),
            "linear_head_dim": "kda.head_dim",
            "linear_conv_kernel_dim": "ssm.conv_kernel",
        },
        constants={"norm_topk_prob": True},
        fixed={"expert_gating_func": SIGMOID, "expert_weights_norm": True},
        computed=(latent, scaled, _kinds, which_are_sparse),
        tensors=ENDS
        | NORMS
        | feed_forward()
        | LATENT
        | KDA
        | experts("block_sparse_moe", gate="w1", up="w3", down="w2")
        | shared_expert("block_sparse_moe.shared_experts")
        | correction("block_sparse_moe.gate.e_score_correction_bias"),
    ),
    Gguf(
        architecture="bailingmoe3",
        model_type="bailing_hybrid",
        head_dim="rope.dimension_count",
        layered=True,
        config={
            **EXPERTS,
            **OWN_WIDTH,
            **RANKS,
            "n_shared_experts": Key("expert_shared_count", 1),
            "n_group": Key("expert_group_count", 1),
            "topk_group": Key("expert_group_used_count", 1),
            "norm_topk_prob": Key("expert_weights_norm", False),
            "head_dim": "kda.head_dim",
            "short_conv_kernel_size": "ssm.conv_kernel",
            "kda_safe_gate": Key("kda.safe_gate", True),
            "kda_lower_bound": "kda.gate_lower_bound",
        },
        constants={"num_mtp_layers": 0},
        fixed={"expert_gating_func": SIGMOID},
        computed=(latent, scaled, _kinds, which_are_sparse),
        tensors=ends("model.word_embeddings")
        | NORMS
        | feed_forward()
        | {
            name.replace(".self_attn.", ".attention.").replace(".o_proj.", ".dense."): made
            for name, made in _LINGS.items()
        }
        | experts()
        | shared_expert("mlp.shared_experts")
        | correction("mlp.gate.expert_bias"),
    ),
)
