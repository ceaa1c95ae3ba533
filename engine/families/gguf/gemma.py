"""Gemma, without what reads pictures and sound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from engine.families.gguf import (
    ATTENTION,
    ENDS,
    FEED_FORWARD,
    LAYER,
    LOWERED_NORMS,
    NORMS_AROUND,
    SOFTMAX,
    File,
    Gguf,
    Key,
    Tensors,
    by_layer,
    layer,
    of_one_value,
    per_layer,
    stacked_experts,
    two_thetas,
    windows,
)

_PER_LAYER: Tensors = {
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    **layer(
        {
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
        }
    ),
}
"""Of small models, which have another embedding for each layer."""
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}


def _scale_of(layers_of_the_largest: int) -> Any:
    """The scale of queries: the width of a head, but for the 27B models, which llama.cpp tells by their layers."""

    def query_scale(_file: File, config: Mapping[str, Any]) -> dict[str, Any]:
        is_largest = config["num_hidden_layers"] == layers_of_the_largest
        wide = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": wide if is_largest else config["head_dim"]}

    return query_scale


def _some_window(_file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": config["sliding_window"] or config["max_position_embeddings"]}


def _gemma4(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
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
    if not 0 <= own <= len(widths):
        raise file.unsupported("attention.shared_kv_layers", shared)
    for factor in (1, 2):
        if widths == [narrow] * own + [factor * narrow] * shared:
            return factor == 2
    raise file.unsupported("feed_forward_length", widths)


def _gemma3n(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    scales = per_layer(file, "activation_sparsity_scale", config, -math.inf)
    return {
        "intermediate_size": per_layer(file, "feed_forward_length", config),
        # llama.cpp's converter keeps how many deviations of a normal distribution leave this share out.
        "activation_sparsity_pattern": [round(NormalDist().cdf(scale), 6) for scale in scales],
        # llama.cpp's code has the number of layers with keys and values of their own.
        "num_kv_shared_layers": file.value(Key("attention.shared_kv_layers", max(layers - 20, 0))),
        "laurel_rank": file.shape("blk.0.laurel_l.weight")[0],
        "vocab_size_per_layer_input": config["vocab_size"],
    }


ROWS = (
    Gguf(
        architecture="gemma",
        model_type="gemma",
        constants=_GELU | {"hidden_act": "gelu_pytorch_tanh"},
        tensors=ENDS
        | ATTENTION
        | FEED_FORWARD
        | LOWERED_NORMS
        | layer({"post_attention_layernorm": "ffn_norm"}, how="lowered"),
    ),
    Gguf(
        architecture="gemma2",
        model_type="gemma2",
        config={
            "final_logit_softcapping": Key("final_logit_softcapping", 30.0),
            "attn_logit_softcapping": Key("attn_logit_softcapping", 50.0),
        },
        constants=_GELU,
        computed=(windows(2), _some_window, _scale_of(46)),
        tensors=ENDS | ATTENTION | FEED_FORWARD | LOWERED_NORMS,
    ),
    Gguf(
        architecture="gemma3n",
        model_type="gemma3n_text",
        own_rope=True,
        layered=True,
        config={
            "num_key_value_heads": "attention.head_count_kv",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "altup_num_inputs": Key("altup.num_inputs", 4),
            "altup_active_idx": Key("altup.active_idx", 0),
            "final_logit_softcapping": Key("final_logit_softcapping", 30.0),
        },
        constants=_GELU | {"altup_correct_scale": True},
        computed=(windows(5), two_thetas(10_000.0), _gemma3n),
        tensors={
            **ENDS,
            **ATTENTION,
            **FEED_FORWARD,
            **NORMS_AROUND,
            **_PER_LAYER,
            "model.altup_projections.{e}.weight": "altup_proj.weight",
            "model.altup_unembed_projections.{e}.weight": "altup_unembd_proj.weight",
            f"{LAYER}.altup.correct_output_scale": "blk.{n}.altup_correct_scale.weight",
            **layer(
                {
                    "correction_coefs": "altup_correct_coef",
                    "prediction_coefs": "altup_predict_coef",
                    "modality_router": "altup_router",
                    "router_norm": "altup_router_norm",
                },
                "altup",
            ),
            **layer(
                {"linear_left": "laurel_l", "linear_right": "laurel_r", "post_laurel_norm": "laurel_post_norm"},
                "laurel",
            ),
        },
    ),
    Gguf(
        architecture="gemma3",
        model_type="gemma3_text",
        own_rope=True,
        config={"final_logit_softcapping": Key("final_logit_softcapping", None)},
        constants={**_GELU, "attn_logit_softcapping": None},
        computed=(windows(6), _some_window, _scale_of(62), two_thetas(10_000.0)),
        tensors=ENDS | ATTENTION | FEED_FORWARD | LOWERED_NORMS,
    ),
    Gguf(
        architecture="gemma4",
        model_type="gemma4_text",
        head_dim="attention.key_length_swa",
        own_rope=True,
        layered=True,
        config={
            "global_head_dim": "attention.key_length",
            "sliding_window": "attention.sliding_window",
            "hidden_size_per_layer_input": Key("embedding_length_per_layer_input", 0),
        },
        constants=_GELU,
        fixed={"expert_gating_func": SOFTMAX, "expert_weights_norm": True, "expert_weights_scale": 1.0},
        computed=(_gemma4,),
        tensors={
            **ENDS,
            **ATTENTION,
            **FEED_FORWARD,
            **NORMS_AROUND,
            **_PER_LAYER,
            **layer(
                {
                    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
                    "post_feedforward_layernorm_1": "post_ffw_norm_1",
                    "post_feedforward_layernorm_2": "post_ffw_norm_2",
                    "router.proj": "ffn_gate_inp",
                }
            ),
            f"{LAYER}.layer_scalar": "blk.{n}.layer_output_scale.weight",
            f"{LAYER}.router.scale": "blk.{n}.ffn_gate_inp.scale",
            f"{LAYER}.router.per_expert_scale": "blk.{n}.ffn_down_exps.scale",
            **stacked_experts("experts"),
        },
    ),
)
