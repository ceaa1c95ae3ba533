"""LFM2-MoE: short convolutions and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import Family
from engine.families.gguf import (
    LAYER,
    SIGMOID,
    File,
    Gguf,
    Key,
    Made,
    attention,
    experts,
    of_one_value,
    per_layer,
    routing,
)
from engine.families.replies import LFM


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = per_layer(file, "attention.head_count_kv", config)
    return {
        "num_key_value_heads": of_one_value(file, "attention.head_count_kv", heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": config["rms_norm_eps"],
    }


FAMILY = Family(
    replies=LFM,
    gguf=Gguf(
        architecture="lfm2moe",
        layered=True,
        config={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_dense_layers": Key("leading_dense_block_count", 0),
            "conv_L_cache": "shortconv.l_cache",
        },
        constants={
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
            "conv_bias": False,
        },
        fixed=routing(norm=True, gating=SIGMOID),
        computed=_computed,
        tensors={
            "model.embed_tokens.weight": "token_embd.weight",
            "model.embedding_norm.weight": "token_embd_norm.weight",
            "lm_head.weight": "output.weight",
            f"{LAYER}.operator_norm.weight": "blk.{n}.attn_norm.weight",
            f"{LAYER}.ffn_norm.weight": "blk.{n}.ffn_norm.weight",
            **attention("q_layernorm", "k_layernorm", "out_proj"),
            f"{LAYER}.conv.conv.weight": Made("convolution", "blk.{n}.shortconv.conv.weight"),
            f"{LAYER}.conv.in_proj.weight": "blk.{n}.shortconv.in_proj.weight",
            f"{LAYER}.conv.out_proj.weight": "blk.{n}.shortconv.out_proj.weight",
            f"{LAYER}.feed_forward.w1.weight": "blk.{n}.ffn_gate.weight",
            f"{LAYER}.feed_forward.w3.weight": "blk.{n}.ffn_up.weight",
            f"{LAYER}.feed_forward.w2.weight": "blk.{n}.ffn_down.weight",
            **experts("feed_forward", gate="w1", up="w3", down="w2"),
            f"{LAYER}.feed_forward.expert_bias": "blk.{n}.exp_probs_b.bias",
        },
    ),
)
