"""Gemma 4, without what reads pictures and sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import Family
from engine.families.gguf import (
    ATTENTION,
    ENDS,
    FEED_FORWARD,
    LAYER,
    SOFTMAX,
    File,
    Gguf,
    Key,
    Made,
    by_layer,
    of_one_value,
    per_layer,
)
from engine.families.replies import GEMMA


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = file.value(Key("attention.shared_kv_layers", 0))
    kinds = ("sliding_attention", "full_attention")
    layers = by_layer(file, "attention.sliding_window_pattern", config, kinds)
    heads = per_layer(file, "attention.head_count_kv", config)
    of_kind = {
        kind: of_one_value(
            file,
            "attention.head_count_kv",
            [count for count, other in zip(heads, layers, strict=True) if other == kind] or heads,
        )
        for kind in kinds
    }
    factors = file.numbers("rope_freqs.weight")  # 1 for what is rotated, 1e30 for what is not
    full = next((at for at, kind in enumerate(layers) if kind == "full_attention"), 0)
    experts = file.value(Key("expert_count", 0))
    return {
        "layer_types": layers,
        "num_key_value_heads": of_kind["sliding_attention"],
        "num_global_key_value_heads": of_kind["full_attention"],
        "attention_k_eq_v": not file.has(f"blk.{full}.attn_v.weight"),
        # llama.cpp's default, and what all published models have.
        "final_logit_softcapping": file.value(Key("final_logit_softcapping", 30.0)) or None,
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": file.value(Key("expert_used_count", 0)) or None,
        "moe_intermediate_size": file.value(Key("expert_feed_forward_length", 0)) or None,
        "vocab_size_per_layer_input": config["vocab_size"],
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": _is_double_wide(file, config, shared),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": file.value(Key("rope.freq_base")),
                "partial_rotary_factor": sum(factor == 1 for factor in factors) / len(factors),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.value(Key("rope.freq_base_swa", 10_000.0)),
            },
        },
    }


def _is_double_wide(file: File, config: Mapping[str, Any], shared: int) -> bool:
    """Whether the layers that share keys and values with earlier ones have feed-forward blocks of twice the width."""
    widths, narrow = per_layer(file, "feed_forward_length", config), config["intermediate_size"]
    own = len(widths) - shared
    for factor in (1, 2):
        if widths == [narrow] * own + [factor * narrow] * shared:
            return factor == 2
    raise file.unsupported("feed_forward_length", widths)


FAMILY = Family(
    replies=GEMMA,
    gguf=Gguf(
        architecture="gemma4",
        head_dim="attention.key_length_swa",
        own_rope=True,
        layered=True,
        config={
            "global_head_dim": "attention.key_length",
            "sliding_window": "attention.sliding_window",
            "hidden_size_per_layer_input": Key("embedding_length_per_layer_input", 0),
        },
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        fixed={"expert_gating_func": SOFTMAX, "expert_weights_norm": True, "expert_weights_scale": 1.0},
        computed=_computed,
        tensors={
            **ENDS,
            **ATTENTION,
            **FEED_FORWARD,
            # Of the smallest models, which have another embedding for each layer.
            "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
            "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
            "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
            **{
                f"{LAYER}.{theirs}": f"blk.{{n}}.{ours}"
                for theirs, ours in {
                    "input_layernorm.weight": "attn_norm.weight",
                    "post_attention_layernorm.weight": "post_attention_norm.weight",
                    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
                    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
                    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
                    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
                    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
                    "layer_scalar": "layer_output_scale.weight",
                    "router.proj.weight": "ffn_gate_inp.weight",
                    "router.scale": "ffn_gate_inp.scale",
                    "router.per_expert_scale": "ffn_down_exps.scale",
                    "experts.down_proj": "ffn_down_exps.weight",
                    "per_layer_input_gate.weight": "inp_gate.weight",
                    "per_layer_projection.weight": "proj.weight",
                    "post_per_layer_input_norm.weight": "post_norm.weight",
                }.items()
            },
            f"{LAYER}.experts.gate_up_proj": (
                "blk.{n}.ffn_gate_up_exps.weight",
                Made("joined", "blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_up_exps.weight"),
            ),
        },
    ),
)
