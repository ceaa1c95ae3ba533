"""Kimi Linear, Ling 3 and GLM-5.3-Flash: linear attention with a gate per channel (KDA) between latent attention."""

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
    ROUTED_EXPERTS,
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
from engine.families.gguf.deepseek import INDEXER, INDEXES, LATENT, RANKS, indexers, latent

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


def _glm5(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = file.value(Key("swiglu_clamp_shexp", config["swiglu_limit"]))
    if shared != config["swiglu_limit"]:
        raise file.unsupported("swiglu_clamp_shexp", shared)
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": file.value(Key("attention.key_length_mla")),
        "v_head_dim": file.value(Key("attention.value_length_mla")),
        "layer_types": [each.replace("full", "indexed") for each in _kinds(file, config)["layer_types"]],
        "linear_num_heads": config["num_attention_heads"],
    }


ROWS = (
    Gguf(
        architecture="glm5-next",
        model_type="glm5_next_text",
        head_dim="kda.head_dim",
        layered=True,
        own_rope=True,
        config={
            **ROUTED_EXPERTS,
            **INDEXES,
            "q_lora_rank": "attention.q_lora_rank",
            "kv_lora_rank": "attention.kv_lora_rank",
            "index_kpool": "attention.indexer.kpool",
            "index_kpool_always_select_tail": Key("attention.indexer.kpool_select_tail", True),
            "linear_head_dim": "kda.head_dim",
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_lower_bound": Key("kda.gate_lower_bound", None),
            "swiglu_limit": "swiglu_clamp_exp",
            "hc_mult": "hyper_connection.count",
            "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
            "hc_eps": "hyper_connection.epsilon",
        },
        fixed={"expert_gating_func": SIGMOID, "rope.dimension_count": 0},
        computed=(scaled, which_are_sparse, indexers, _glm5),
        tensors=ENDS
        | NORMS
        | feed_forward()
        | LATENT
        | KDA
        | INDEXER
        | experts()
        | shared_expert("mlp.shared_experts")
        | correction("mlp.gate.e_score_correction_bias")
        | {f"{LAYER}.self_attn.A_log": Made("logarithm", "blk.{n}.ssm_a")}
        | {
            f"{LAYER}.self_attn.indexer.index_kpool_compress_{part}": f"blk.{{n}}.indexer_compressor_{part}.weight"
            for part in ("ape", "gate")
        }
        | {
            f"{LAYER}.hc_{block}_{part}": f"blk.{{n}}.hc_{block}_{part}.weight"
            for block in ("attn", "ffn")
            for part in ("fn", "base", "scale")
        },
    ),
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
