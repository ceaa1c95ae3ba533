"""Architectures of the usual kind: a row each.

What is odd has a file beside this one; `table` has them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.families.gguf import (
    ATTENTION,
    DENSE,
    ENDS,
    EXPERTS,
    FEED_FORWARD,
    GROUPS,
    LAYER,
    LOCAL_EXPERTS,
    LOWERED_NORMS,
    NORMS,
    NORMS_AROUND,
    OWN_WIDTH,
    ROTATED_ATTENTION,
    ROUTED_EXPERTS,
    SHARED_WIDTH,
    SIGMOID,
    SOFTMAX,
    TIMES,
    File,
    Gguf,
    Key,
    Made,
    Tensors,
    attention,
    by_layer,
    correction,
    experts,
    feed_forward,
    has_query_norm,
    heads_of_some,
    layer,
    of_one_value,
    per_layer,
    routing,
    scale_of_weights,
    scaled,
    shared_expert,
    stacked_experts,
    two_thetas,
    which_are_sparse,
    windows,
)

_NO_WINDOW = {"use_sliding_window": False}
_ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_MIXTRALS = experts("block_sparse_moe", gate="w1", up="w3", down="w2")


def _smollm3(_file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    return {
        # llama.cpp rotates all layers but every fourth.
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in layers],
        "layer_types": ["full_attention" for _ in layers],
    }


_ERNIES: dict[str, str | Key] = {
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    **OWN_WIDTH,
    "moe_layer_start_index": Key("leading_dense_block_count", 0),
}


def _ernie_shares(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = file.value(Key("expert_shared_feed_forward_length", 0))
    return {"moe_num_shared_experts": shared // config["moe_intermediate_size"]}


def _ernie_layers(_file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"moe_layer_end_index": config["num_hidden_layers"] - 1, "use_bias": config["attention_bias"]}


_CONVOLUTION: dict[str, str | Key] = {
    "conv_L_cache": "shortconv.l_cache",
    "norm_eps": "attention.layer_norm_rms_epsilon",
}
_LFM2: Tensors = ENDS | layer({"operator_norm": "attn_norm", "ffn_norm": "ffn_norm"})
_LFM2 |= attention("q_layernorm", "k_layernorm", "out_proj") | feed_forward("feed_forward", "w1", "w3", "w2")
_LFM2 |= layer({"in_proj": "shortconv.in_proj", "out_proj": "shortconv.out_proj"}, "conv")
_LFM2 |= layer({"conv": "shortconv.conv"}, "conv", "convolution")
_LFM2 |= {"model.embedding_norm.weight": "token_embd_norm.weight"}


def _all_attend(_file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": ["full_attention"] * config["num_hidden_layers"], "sliding_window": None}


def _afmoe(file: File, _config: Mapping[str, Any]) -> dict[str, Any]:
    return {"route_scale": scale_of_weights(file)}


def _hy_v3(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    own = config["moe_intermediate_size"]
    return {
        "num_shared_experts": file.value(Key("expert_shared_feed_forward_length", own)) // own,
        "router_scaling_factor": scale_of_weights(file),
    }


def _laguna(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    full, other = (config["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention"))
    width, rotated = config["head_dim"], file.value(Key("rope.dimension_count", config["head_dim"]))
    of_windows = file.value(Key("rope.dimension_count_swa", rotated))
    heads = per_layer(file, "attention.head_count", config)
    return {
        "gating": "per-head" if file.shape("blk.0.attn_gate.weight")[0] == heads[0] else "per-element",
        "num_attention_heads_per_layer": heads,
        "moe_routed_scaling_factor": scale_of_weights(file),
        "rope_parameters": {
            "full_attention": {**full, "partial_rotary_factor": rotated / width},
            "sliding_attention": {**other, "partial_rotary_factor": of_windows / width},
        },
    }


def _cohere2_moe(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    gating = file.value(Key("expert_gating_func", SIGMOID))
    return {
        "expert_selection_fn": "softmax" if gating == SOFTMAX else "sigmoid",
        "rms_norm_eps": file.value(Key("attention.layer_norm_rms_epsilon", None)),
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }


def _mimo(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    key, kinds = "attention.head_count_kv", config["layer_types"]
    heads = list(zip(per_layer(file, key, config), kinds, strict=True))
    narrow, wide = (
        of_one_value(file, key, [count for count, own in heads if own == kind])
        for kind in ("full_attention", "sliding_attention")
    )
    if wide != 2 * narrow:
        raise file.unsupported("attention.head_count_kv", [narrow, wide])
    rotated = (file.value(Key("rope.dimension_count")) + 0.5) / config["head_dim"]
    rope = {kind: {**each, "partial_rotary_factor": rotated} for kind, each in config["rope_parameters"].items()}
    return {"num_key_value_heads": narrow, "rope_parameters": rope}


def _minimax_01(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, names = range(config["num_hidden_layers"]), ("full_attn", "linear_attn", "mlp")
    sums = [file.has(f"blk.{n}.attn_gate.weight") for n in layers]
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in sums],
        **{f"{name}_alpha_factor": file.value(Key("residual_scale")) for name in names},
    }


def _minimax_m3(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    has = [file.has(f"blk.{n}.indexer.k_proj.weight") for n in layers]
    return {
        "shared_intermediate_size": file.value(Key("expert_shared_count", 1)) * config["intermediate_size"],
        "layer_types": ["minimax_m3_sparse" if each else "full_attention" for each in has],
    }


def _step35(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = config["layer_types"]
    heads = list(zip(per_layer(file, "attention.head_count", config), kinds, strict=True))
    full, of_windows = (
        of_one_value(file, "attention.head_count", [count for count, own in heads if own == kind])
        for kind in ("full_attention", "sliding_attention")
    )
    key_heads = per_layer(file, "attention.head_count_kv", config)
    rotated = file.value(Key("rope.dimension_count", config["head_dim"]))
    # llama.cpp halves it for layers without a window.
    rope, part = file.rope(rotated // 2), rotated / config["head_dim"]
    theta = {"rope_type": "default", "rope_theta": file.value(Key("rope.freq_base_swa", rope["rope_theta"]))}
    return {
        "num_attention_heads": full,
        "num_sliding_attention_heads": of_windows,
        "num_key_value_heads": of_one_value(file, "attention.head_count_kv", key_heads),
        "moe_router_scaling_factor": scale_of_weights(file),
        "swiglu_limits": per_layer(file, "swiglu_clamp_exp", config, 0.0),
        "swiglu_limits_shared": per_layer(file, "swiglu_clamp_shexp", config, 0.0),
        "rope_parameters": {
            "full_attention": {**rope, "partial_rotary_factor": part / 2},
            "sliding_attention": {**theta, "partial_rotary_factor": part},
        },
    }


def _ministral(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    # Queries grow with the logarithm of the position, as Llama 4's do.
    beta = {"llama_4_scaling_beta": file.value(Key("attention.temperature_scale"))}
    return {"rope_parameters": config["rope_parameters"] | beta, "sliding_window": None}


def _smallthinker(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, window = range(config["num_hidden_layers"]), file.value(Key("attention.sliding_window", 0))
    kinds = by_layer(
        file, "attention.sliding_window_pattern", config, ("1", "0"), 4 if window else 1, first=bool(window)
    )
    return {
        "sliding_window_layout": [int(each) for each in kinds],
        # llama.cpp rotates all layers but every fourth, if any slide.
        "rope_layout": [int(not window or layer % 4 != 0) for layer in layers],
        "moe_primary_router_apply_softmax": file.value(Key("expert_gating_func")) == SOFTMAX,
    }


def _k2_horizon(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(config["num_hidden_layers"])
    sparse = [n for n in layers if file.has(f"blk.{n}.ffn_gate_inp.weight")]
    shared, own = file.value(Key("expert_shared_feed_forward_length", 0)), config["moe_intermediate_size"]
    return {
        "mlp_only_layers": [n for n in layers if n not in sparse],
        "num_shared_experts": shared // own if own else 0,
        "router_scaling_factor": scale_of_weights(file),
        "router_score_func": "softmax" if file.value(Key("expert_gating_func", SIGMOID)) == SOFTMAX else "sigmoid",
        "moe_gate_bias": any(file.has(f"blk.{n}.exp_probs_b.bias") for n in sparse),
        "query_key_norm": file.has("blk.0.attn_q_norm.weight"),
        "attention_gate_func": "softplus" if file.has("blk.0.attn_gate.weight") else None,
    }


_GROVES: Tensors = {
    f"{LAYER}.mlp.chunk_experts.{{e}}.{part}_proj.weight": f"blk.{{n}}.ffn_{part}_chexps.weight"
    for part in ("gate", "up", "down")
}
"""Experts that groups of others share."""

_BESIDE = {
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "logit_scale": "logit_scale",
}
"""Of Cohere's models, in which attention and the feed-forward block are side by side."""

_GLM4 = Gguf(
    architecture="glm4",
    model_type="glm4",
    partial_rotary=True,
    tensors=ENDS
    | ATTENTION
    | layer(
        {
            "input_layernorm": "attn_norm",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
    ),
)
_SECTIONS = "glm4.rope.dimension_sections"
"""Says that a file is of a model that sees, whose queries and keys have halves instead of pairs."""
_OF_HALVES: Tensors = {
    f"{LAYER}.self_attn.{which}_proj.{kind}": Made("pairwise", f"blk.{{n}}.attn_{which}.{kind}")
    for which in ("q", "k")
    for kind in ("weight", "bias")
}


ROWS = (
    Gguf(
        architecture="afmoe",
        model_type="afmoe",
        config={
            **EXPERTS,
            **OWN_WIDTH,
            "num_shared_experts": Key("expert_shared_count", 0),
            "num_dense_layers": Key("leading_dense_block_count", 0),
        },
        constants={"mup_enabled": True},
        fixed={"expert_weights_norm": True, "expert_gating_func": SIGMOID},
        computed=(windows(4), _afmoe),
        tensors=ENDS
        | ATTENTION
        | FEED_FORWARD
        | experts(router="router.gate")
        | shared_expert("mlp.shared_experts")
        | correction("mlp.expert_bias")
        | layer(
            {
                "input_layernorm": "attn_norm",
                "post_attention_layernorm": "post_attention_norm",
                "pre_mlp_layernorm": "ffn_norm",
                "post_mlp_layernorm": "post_ffw_norm",
                "self_attn.gate_proj": "attn_gate",
            }
        ),
    ),
    Gguf(
        architecture="arctic",
        model_type="arctic",
        config=LOCAL_EXPERTS,
        constants={"moe_layer_frequency": 1, "parallel_attn_mlp_res": True},
        fixed=routing(norm=True),
        tensors=ENDS
        | ROTATED_ATTENTION
        | _MIXTRALS
        | layer({"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm_exps"})
        | layer({"residual_layernorm": "ffn_norm"})
        | feed_forward("residual_mlp", "w1", "w3", "w2"),
    ),
    # Ling 1 mixes experts as ERNIE 4.5 does, but adds nothing to their scores; its file has rotary pairs side by side,
    # which is how ERNIE rotates.
    Gguf(
        architecture="bailingmoe",
        model_type="ernie4_5_moe",
        config={
            **_ERNIES,
            "moe_num_shared_experts": Key("expert_shared_count", 0),
        },
        constants={"moe_layer_interval": 1},
        fixed=routing(norm=True),
        computed=(_ernie_layers,),
        tensors=DENSE
        | experts()
        | shared_expert("mlp.shared_experts")
        | {
            f"{LAYER}.mlp.moe_statics.e_score_correction_bias": Made("no_correction", "blk.{n}.ffn_gate_inp.weight"),
            f"{LAYER}.mlp.gate.weight": "blk.{n}.ffn_gate_inp.weight",
        },
    ),
    # Ling 2 is GLM-4.5 but for its sizes.
    Gguf(
        architecture="bailingmoe2",
        model_type="glm4_moe",
        partial_rotary=True,
        config=ROUTED_EXPERTS,
        fixed={"expert_gating_func": SIGMOID},
        computed=(scaled, has_query_norm),
        tensors=DENSE
        | experts()
        | shared_expert("mlp.shared_experts")
        | correction("mlp.gate.e_score_correction_bias"),
    ),
    Gguf(
        architecture="cohere2",
        model_type="cohere2",
        eps="attention.layer_norm_epsilon",
        config=_BESIDE,
        computed=(windows(4),),
        tensors=DENSE,
    ),
    Gguf(
        architecture="cohere2moe",
        model_type="cohere2_moe",
        eps="attention.layer_norm_epsilon",
        config={
            **EXPERTS,
            **_BESIDE,
            "intermediate_size": "expert_feed_forward_length",
            "prefix_dense_intermediate_size": "feed_forward_length",
            "num_shared_experts": Key("expert_shared_count", 0),
            "norm_topk_prob": Key("expert_weights_norm", False),
        },
        constants={"shared_expert_combination_strategy": "average"},
        fixed={"expert_weights_scale": 1.0},
        computed=(windows(4, first=True), which_are_sparse, _cohere2_moe),
        tensors=DENSE | experts() | shared_expert("mlp.shared_experts"),
    ),
    Gguf(
        architecture="command-r",
        model_type="cohere",
        eps="attention.layer_norm_epsilon",
        config=_BESIDE,
        computed=(has_query_norm,),
        tensors=DENSE,
    ),
    Gguf(
        architecture="deepseek",
        model_type="deepseek",
        config=ROUTED_EXPERTS,
        fixed=routing(norm=False),
        tensors=DENSE | ROTATED_ATTENTION | experts() | shared_expert("mlp.shared_experts"),
    ),
    Gguf(
        architecture="dots1",
        model_type="dots1",
        config=ROUTED_EXPERTS,
        fixed={"expert_gating_func": SIGMOID},
        computed=(scaled, _all_attend),
        tensors=DENSE
        | experts()
        | shared_expert("mlp.shared_experts")
        | correction("mlp.gate.e_score_correction_bias"),
    ),
    Gguf(
        architecture="ernie4_5",
        model_type="ernie4_5",
        computed=(lambda _, config: {"use_bias": config["attention_bias"]},),
        tensors=DENSE,
    ),
    Gguf(
        architecture="ernie4_5-moe",
        model_type="ernie4_5_moe",
        config={**_ERNIES, "moe_layer_interval": "interleave_moe_layer_step"},
        fixed=routing(norm=True),
        computed=(_ernie_shares, _ernie_layers),
        tensors=DENSE
        | experts()
        | shared_expert("mlp.shared_experts")
        | correction("mlp.moe_statics.e_score_correction_bias", "row"),
    ),
    Gguf(
        architecture="exaone4",
        model_type="exaone4",
        computed=(windows(4),),
        tensors=ENDS | NORMS_AROUND | ATTENTION | FEED_FORWARD,
    ),
    Gguf(
        architecture="exaone-moe",
        model_type="exaone_moe",
        config={
            **EXPERTS,
            **OWN_WIDTH,
            "num_shared_experts": Key("expert_shared_count", 0),
            "norm_topk_prob": Key("expert_weights_norm", False),
            **GROUPS,
        },
        fixed={"expert_gating_func": SIGMOID},
        computed=(scaled, windows(4), which_are_sparse),
        tensors=DENSE | experts() | shared_expert("mlp.shared_experts") | correction("mlp.e_score_correction_bias"),
    ),
    replace(_GLM4, when=lambda metadata: _SECTIONS not in metadata),
    replace(_GLM4, when=lambda metadata: _SECTIONS in metadata, tensors={**_GLM4.tensors, **_OF_HALVES}),
    Gguf(
        architecture="glm4moe",
        model_type="glm4_moe",
        partial_rotary=True,
        config=ROUTED_EXPERTS,
        fixed={"expert_gating_func": SIGMOID},
        computed=(scaled, has_query_norm),
        tensors=ENDS
        | NORMS_AROUND
        | ATTENTION
        | FEED_FORWARD
        | experts()
        | shared_expert("mlp.shared_experts")
        | correction("mlp.gate.e_score_correction_bias"),
    ),
    # llama.cpp gives the groups' experts what the others have computed; the model's makers give them the same input.
    Gguf(
        architecture="grovemoe",
        model_type="grove_moe",
        config={
            **EXPERTS,
            **OWN_WIDTH,
            "parallel_expert_intermediate_size": "expert_chunk_feed_forward_length",
            "num_experts_per_group": "experts_per_group",
            "parallel_expert_scale": "expert_group_scale",
        },
        constants={"norm_topk_prob": True, **_ALL_SPARSE},
        fixed=routing(norm=True),
        tensors=ENDS | NORMS | ATTENTION | experts() | _GROVES,
        unwritten="llama.cpp gives its experts of groups another input than the model's makers do",
    ),
    Gguf(
        architecture="hunyuan-dense",
        model_type="hunyuan_v1_dense",
        tensors=DENSE | attention("query_layernorm", "key_layernorm"),
    ),
    Gguf(
        architecture="hunyuan-moe",
        model_type="hunyuan_v1_moe",
        config={"num_experts": "expert_count", "moe_topk": "expert_used_count"},
        fixed=routing(norm=True),
        tensors=ENDS
        | NORMS
        | attention("query_layernorm", "key_layernorm")
        | experts(router="gate.wg")
        | shared_expert("mlp.shared_mlp"),
    ),
    Gguf(
        architecture="hy_v3",
        model_type="hy_v3",
        config={**EXPERTS, **OWN_WIDTH},
        fixed={"expert_weights_norm": True, "expert_gating_func": SIGMOID},
        computed=(which_are_sparse, _hy_v3),
        tensors=DENSE | experts(router="router.gate") | shared_expert("mlp.shared_mlp") | correction("mlp.expert_bias"),
    ),
    Gguf(
        architecture="k2-horizon",
        model_type="k2_horizon",
        config={
            "num_experts": Key("expert_count", 0),
            "num_experts_per_tok": Key("expert_used_count", 0),
            "moe_intermediate_size": Key("expert_feed_forward_length", 0),
            "norm_topk_prob": Key("expert_weights_norm", False),
            "layernorm_num_groups": Key("attention.group_norm_groups", 1),
            "mova_num_experts": Key("attention.value_expert_count", 0),
            "mova_num_experts_per_tok": Key("attention.value_expert_used_count", 0),
        },
        constants={"decoder_sparse_step": 1},
        computed=(_k2_horizon,),
        tensors=DENSE
        | experts()
        | shared_expert("mlp.shared_experts")
        | correction("mlp.gate.bias")
        | layer({"gate_proj": "attn_gate", "v_router": "attn_v_gate"}, "self_attn")
        | {f"{LAYER}.self_attn.v_experts.{{e}}.weight": "blk.{n}.attn_v_exps.weight"},
        unwritten="only a branch of llama.cpp by the model's makers reads such files",
    ),
    Gguf(
        architecture="laguna",
        model_type="laguna",
        layered=True,
        own_rope=True,
        config={**EXPERTS, **OWN_WIDTH, **SHARED_WIDTH, "num_key_value_heads": "attention.head_count_kv"},
        fixed={"expert_weights_norm": True, "expert_gating_func": SIGMOID},
        computed=(windows(4, first=True), which_are_sparse, two_thetas(), _laguna),
        tensors=DENSE
        | experts()
        | shared_expert("mlp.shared_expert")
        | correction("mlp.experts.e_score_correction_bias")
        | layer({"g_proj": "attn_gate"}, "self_attn"),
    ),
    Gguf(
        architecture="lfm2",
        model_type="lfm2",
        layered=True,
        config=_CONVOLUTION,
        constants={"conv_bias": False, "block_auto_adjust_ff_dim": False},
        computed=(heads_of_some("conv"),),
        tensors=_LFM2,
    ),
    Gguf(
        architecture="lfm2moe",
        model_type="lfm2_moe",
        layered=True,
        config={
            **EXPERTS,
            **OWN_WIDTH,
            **_CONVOLUTION,
            "num_dense_layers": Key("leading_dense_block_count", 0),
        },
        constants={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True, "conv_bias": False},
        fixed=routing(norm=True, gating=SIGMOID),
        computed=(heads_of_some("conv"),),
        tensors=_LFM2 | experts("feed_forward", gate="w1", up="w3", down="w2") | correction("feed_forward.expert_bias"),
    ),
    Gguf(
        architecture="llama",
        model_type="llama",
        when=lambda metadata: not metadata.get("llama.expert_count"),
        tensors=DENSE | ROTATED_ATTENTION,
    ),
    # Llama under other names.
    Gguf(architecture="exaone", model_type="llama", tensors=DENSE),
    Gguf(architecture="internlm2", model_type="llama", tensors=DENSE | ROTATED_ATTENTION),
    Gguf(
        architecture="llama",
        model_type="mixtral",
        when=lambda metadata: bool(metadata.get("llama.expert_count")),
        config={**LOCAL_EXPERTS, "sliding_window": Key("attention.sliding_window", None)},
        fixed=routing(norm=True),
        tensors=ENDS | NORMS | ROTATED_ATTENTION | _MIXTRALS,
    ),
    Gguf(
        architecture="mellum",
        model_type="mellum",
        own_rope=True,
        config={**EXPERTS, **OWN_WIDTH},
        constants={"norm_topk_prob": True},
        fixed=routing(norm=True),
        computed=(windows(4), which_are_sparse, two_thetas()),
        tensors=DENSE | experts(),
    ),
    Gguf(
        architecture="mimo2",
        model_type="mimo_v2_flash",
        layered=True,
        own_rope=True,
        config={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            **OWN_WIDTH,
            "v_head_dim": "attention.value_length",
            "attention_value_scale": Key("attention.value_scale", 1.0),
        },
        constants={"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        fixed=routing(norm=True, gating=SIGMOID),
        computed=(windows(), which_are_sparse, two_thetas(), _mimo),
        tensors=DENSE
        | experts()
        | correction("mlp.gate.e_score_correction_bias")
        | {f"{LAYER}.self_attn.attention_sink_bias": "blk.{n}.attn_sinks.weight"},
    ),
    Gguf(
        architecture="minimax-01",
        model_type="minimax",
        partial_rotary=True,
        config=LOCAL_EXPERTS,
        constants={"router_jitter_noise": 0.0},
        fixed=routing(norm=True),
        computed=(_minimax_01,),
        tensors=ENDS
        | NORMS
        | ATTENTION
        | _MIXTRALS
        | layer({"qkv_proj": "attn_qkv", "output_gate": "attn_gate", "norm": "attn_norm_2"}, "self_attn")
        | {
            f"{LAYER}.self_attn.{theirs}_proj.weight": Made(
                "first", "blk.{n}.attn_output.weight", f"blk.{{n}}.attn_{beside}.weight"
            )
            for theirs, beside in {"o": "q", "out": "gate"}.items()
        },
    ),
    Gguf(
        architecture="minimax-m2",
        model_type="minimax_m2",
        partial_rotary=True,
        config=LOCAL_EXPERTS,
        constants={"router_jitter_noise": 0.0},
        fixed=routing(norm=True, gating=SIGMOID),
        tensors=ENDS | NORMS | ATTENTION | _MIXTRALS | correction("block_sparse_moe.e_score_correction_bias"),
    ),
    Gguf(
        architecture="minimax-m3",
        model_type="minimax_m3_vl_text",
        partial_rotary=True,
        config={
            **LOCAL_EXPERTS,
            "intermediate_size": "expert_feed_forward_length",
            "dense_intermediate_size": "feed_forward_length",
            "rotary_dim": "rope.dimension_count",
            "index_n_heads": "attention.indexer.head_count",
            "index_head_dim": "attention.indexer.key_length",
            "index_topk_blocks": "attention.indexer.top_k",
            "index_block_size": "attention.indexer.block_size",
            "index_local_blocks": "attention.indexer.local_blocks",
        },
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "router_jitter_noise": 0.0},
        fixed={"expert_weights_norm": True, "expert_gating_func": SIGMOID},
        computed=(scaled, which_are_sparse, _minimax_m3),
        tensors=ENDS
        | ATTENTION
        | LOWERED_NORMS
        | layer({"post_attention_layernorm": "ffn_norm"}, how="lowered")
        | layer({"mlp.gate": "ffn_gate_inp"})
        | correction("mlp.gate.e_score_correction_bias")
        | stacked_experts("mlp.experts")
        | layer({"mlp.down_proj": "ffn_down", "mlp.shared_experts.down_proj": "ffn_down_shexp"})
        | {
            f"{LAYER}.mlp.{block}gate_up_proj.weight": Made(
                "joined", f"blk.{{n}}.ffn_gate{kind}.weight", f"blk.{{n}}.ffn_up{kind}.weight"
            )
            for block, kind in (("", ""), ("shared_experts.", "_shexp"))
        }
        | layer({"q_proj": "indexer.q_proj", "k_proj": "indexer.k_proj"}, "self_attn.indexer")
        | layer({"q_norm": "indexer.q_norm", "k_norm": "indexer.k_norm"}, "self_attn.indexer", "lowered"),
    ),
    Gguf(
        architecture="mistral3",
        model_type="mistral",
        when=lambda metadata: not metadata.get("mistral3.attention.temperature_scale"),
        constants={"sliding_window": None},
        tensors=DENSE | ROTATED_ATTENTION,
    ),
    Gguf(
        architecture="mistral3",
        model_type="ministral3",
        when=lambda metadata: bool(metadata.get("mistral3.attention.temperature_scale")),
        computed=(_ministral,),
        tensors=DENSE | ROTATED_ATTENTION,
    ),
    Gguf(
        architecture="olmo2",
        model_type="olmo2",
        when=lambda metadata: not metadata.get("olmo2.attention.sliding_window"),
        tensors=ENDS | NORMS_AROUND | ATTENTION | FEED_FORWARD,
    ),
    Gguf(
        architecture="olmo2",
        model_type="olmo3",
        when=lambda metadata: bool(metadata.get("olmo2.attention.sliding_window")),
        own_rope=True,
        computed=(windows(4), two_thetas()),
        tensors=ENDS | NORMS_AROUND | ATTENTION | FEED_FORWARD,
    ),
    Gguf(
        architecture="olmoe",
        model_type="olmoe",
        config={**EXPERTS, "clip_qkv": Key("attention.clamp_kqv", None)},
        constants={"norm_topk_prob": False},
        fixed=routing(norm=False),
        tensors=ENDS | NORMS | ATTENTION | experts(),
    ),
    *(
        Gguf(architecture=name, model_type="qwen2", constants=_NO_WINDOW, tensors=DENSE)
        for name in ("qwen2", "qwen2vl")
    ),
    Gguf(
        architecture="qwen2moe",
        model_type="qwen2_moe",
        config={**EXPERTS, **OWN_WIDTH, **SHARED_WIDTH},
        constants={"norm_topk_prob": False, **_ALL_SPARSE, **_NO_WINDOW, "qkv_bias": True},
        fixed=routing(norm=False),
        tensors=ENDS
        | NORMS
        | ATTENTION
        | experts()
        | shared_expert("mlp.shared_expert")
        | layer({"shared_expert_gate": "ffn_gate_inp_shexp"}, "mlp", "row"),
    ),
    # Of text alone, the models that see pictures rotate as the others do.
    *(
        Gguf(architecture=name, model_type="qwen3", constants=_NO_WINDOW, tensors=DENSE)
        for name in ("qwen3", "qwen3vl")
    ),
    *(
        Gguf(
            architecture=name,
            model_type="qwen3_moe",
            config={**EXPERTS, **OWN_WIDTH},
            constants={"norm_topk_prob": True, **_ALL_SPARSE, **_NO_WINDOW},
            fixed=routing(norm=True),
            tensors=ENDS | NORMS | ATTENTION | experts(),
        )
        for name in ("qwen3moe", "qwen3vlmoe")
    ),
    Gguf(
        architecture="seed_oss",
        model_type="seed_oss",
        computed=(lambda file, _: {"attention_out_bias": file.has("blk.0.attn_output.bias")},),
        tensors=ENDS | NORMS_AROUND | ATTENTION | FEED_FORWARD,
    ),
    Gguf(
        architecture="smallthinker",
        model_type="smallthinker",
        config={
            "moe_num_primary_experts": "expert_count",
            "moe_num_active_primary_experts": "expert_used_count",
            "moe_ffn_hidden_size": "expert_feed_forward_length",
            "sliding_window_size": Key("attention.sliding_window", None),
        },
        constants={"moe_enable_early_router": True},
        # llama.cpp has this width, whatever a file says.
        fixed={"expert_weights_norm": True, "expert_weights_scale": 1.0, "attention.sliding_window": 4096},
        computed=(_smallthinker,),
        tensors=ENDS
        | NORMS
        | ATTENTION
        | experts("block_sparse_moe", gate="gate", up="up", down="down", router="primary_router"),
        unwritten="which of its layers rotate, and which have a window, is not written",
    ),
    Gguf(
        architecture="smollm3",
        model_type="smollm3",
        constants=_NO_WINDOW,
        computed=(_smollm3,),
        tensors=DENSE | ROTATED_ATTENTION,
    ),
    Gguf(
        architecture="step35",
        model_type="step3p5",
        layered=True,
        own_rope=True,
        config={
            "n_routed_experts": "expert_count",
            **TIMES,
            **OWN_WIDTH,
            "share_expert_dim": "expert_shared_feed_forward_length",
        },
        fixed={"expert_weights_norm": True, "expert_gating_func": SIGMOID},
        computed=(windows(), which_are_sparse, _step35),
        tensors=ENDS
        | ATTENTION
        | FEED_FORWARD
        | layer({"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}, how="lowered")
        | layer({"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}, "self_attn", "lowered")
        | {"model.norm.weight": Made("lowered", "output_norm.weight")}
        | layer({"self_attn.g_proj": "attn_gate", "mlp.gate": "ffn_gate_inp"})
        | stacked_experts("mlp.experts")
        | shared_expert("mlp.shared_experts")
        | correction("mlp.gate.e_score_correction_bias"),
    ),
)
