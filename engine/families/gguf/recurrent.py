"""Families whose layers sum up what was before: Mamba (Jamba, Nemotron-H, Granite 4), delta nets (Qwen), KDA (Kimi)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ARRAY,
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
    OWN_WIDTH,
    ROTATED_ATTENTION,
    ROUTED_EXPERTS,
    SHARED_WIDTH,
    SIGMOID,
    File,
    Gguf,
    Key,
    Made,
    Tensors,
    by_layer,
    correction,
    ends,
    experts,
    feed_forward,
    heads_of_some,
    layer,
    of_one_value,
    per_layer,
    routing,
    scaled,
    shared_expert,
    stacked_experts,
    which_are_sparse,
    windows,
)
from engine.families.gguf.deepseek import INDEXER, INDEXES, LATENT, RANKS, indexers, latent


def mamba_2(block: str, layers: str = LAYER) -> Tensors:
    place = f"{layers}.{block}"
    return {
        f"{place}.in_proj.weight": "blk.{n}.ssm_in.weight",
        f"{place}.conv1d.weight": Made("convolution", "blk.{n}.ssm_conv1d.weight"),
        f"{place}.conv1d.bias": "blk.{n}.ssm_conv1d.bias",
        f"{place}.dt_bias": "blk.{n}.ssm_dt.bias",
        f"{place}.A_log": Made("logarithm", "blk.{n}.ssm_a"),
        f"{place}.D": Made("flat", "blk.{n}.ssm_d"),
        f"{place}.norm.weight": Made("flat", "blk.{n}.ssm_norm.weight"),
        f"{place}.out_proj.weight": "blk.{n}.ssm_out.weight",
    }


def _every(file: File, key: str, layers: list[int], count: int) -> tuple[int, int]:
    """From which layer on, and how often, a kind of layer comes."""
    first = layers[0] if layers else count
    period = layers[1] - first if len(layers) > 1 else count
    if layers != list(range(first, count, period)):
        raise file.unsupported(key, layers)
    return first, period


def _jamba(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    count, heads = config["num_hidden_layers"], per_layer(file, "attention.head_count_kv", config)
    attend = [n for n, number in enumerate(heads) if number]
    sparse = [n for n in range(count) if file.has(f"blk.{n}.ffn_gate_inp.weight")]
    offset, period = _every(file, "attention.head_count_kv", attend, count)
    first, every = _every(file, "expert_count", sparse, count)
    return {
        "num_key_value_heads": of_one_value(file, "attention.head_count_kv", heads),
        "attn_layer_offset": offset,
        "attn_layer_period": period,
        "expert_layer_offset": first,
        "expert_layer_period": every,
        "mamba_expand": file.value(Key("ssm.inner_size")) // config["hidden_size"],
    }


def _nemotron(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = per_layer(file, "attention.head_count_kv", config)
    widths = per_layer(file, "feed_forward_length", config)
    count, inner = config["mamba_num_heads"], file.value(Key("ssm.inner_size"))
    return {
        "num_key_value_heads": of_one_value(file, "attention.head_count_kv", heads),
        "layers_block_type": [
            "full_attention"
            if number
            else "linear_attention"
            if not width
            else "moe"
            if file.has(f"blk.{n}.ffn_gate_inp.weight")
            else "mlp"
            for n, (number, width) in enumerate(zip(heads, widths, strict=True))
        ],
        "mamba_head_dim": inner // count,
        "expand": max(inner // config["hidden_size"], 1),
        "mlp_bias": any(file.has(f"blk.{n}.ffn_up.bias") for n in range(len(heads))),
        "use_conv_bias": any(file.has(f"blk.{n}.ssm_conv1d.bias") for n in range(len(heads))),
    }


_BLOCK = "backbone.layers.{n}"
_MIXER = f"{_BLOCK}.mixer"


def _in_mixer(tensors: Tensors) -> Tensors:
    """The same where attention, or a feed-forward block, is all of a layer."""
    return {f"{_MIXER}.{name.split('.', 4)[4]}": made for name, made in tensors.items()}


_STATE: dict[str, str | Key] = {
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    "mamba_num_heads": "ssm.time_step_rank",
}
_NEMOTRON: Tensors = {
    **ends("backbone.embeddings", "backbone.norm_f"),
    f"{_BLOCK}.norm.weight": "blk.{n}.attn_norm.weight",
    **mamba_2("mixer", _BLOCK),
    **_in_mixer(ATTENTION | FEED_FORWARD),
}


def _multipliers(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp takes 0, and none, as no multiplier."""
    return {
        "embedding_multiplier": file.value(Key("embedding_scale", 0.0)) or 1.0,
        "residual_multiplier": file.value(Key("residual_scale", 0.0)) or 1.0,
        "logits_scaling": file.value(Key("logit_scale", 0.0)) or 1.0,
        "attention_multiplier": file.value(Key("attention.scale", 0.0)) or config["head_dim"] ** -0.5,
    }


def _thetas(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    theta, layers = config["rope_parameters"]["rope_theta"], config["num_hidden_layers"]
    rotated = per_layer(file, "attention.rope_pattern", config, True)
    return {"layer_rope_theta": [theta if each else 0.0 for each in rotated[:layers]]}


_GRANITE_EXPERTS: dict[str, str | Key] = {
    "num_local_experts": Key("expert_count", 0),
    "num_experts_per_tok": Key("expert_used_count", 0),
}
_GRANITES: Tensors = {
    **ENDS,
    **NORMS,
    **ROTATED_ATTENTION,
    f"{LAYER}.block_sparse_moe.router.layer.weight": "blk.{n}.ffn_gate_inp.weight",
    f"{LAYER}.block_sparse_moe.input_linear.weight": (
        "blk.{n}.ffn_gate_up_exps.weight",
        Made("joined", "blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_up_exps.weight"),
    ),
    f"{LAYER}.block_sparse_moe.output_linear.weight": "blk.{n}.ffn_down_exps.weight",
}
_GRANITE_SHARED: Tensors = {
    f"{LAYER}.shared_mlp.input_linear.weight": (
        Made("joined", "blk.{n}.ffn_gate_shexp.weight", "blk.{n}.ffn_up_shexp.weight"),
        Made("joined", "blk.{n}.ffn_gate.weight", "blk.{n}.ffn_up.weight"),
    ),
    f"{LAYER}.shared_mlp.output_linear.weight": ("blk.{n}.ffn_down_shexp.weight", "blk.{n}.ffn_down.weight"),
}
"""The expert of every token, or the only one of a dense model."""


def _hybrid(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    inner, mamba_heads = file.value(Key("ssm.inner_size")), file.value(Key("ssm.time_step_rank"))
    dense = not config["num_local_experts"]
    return {
        # This key is llama.cpp's switch for rotary embeddings in these models.
        "position_embedding_type": "rope" if file.value(Key("rope.scaling.finetuned", True)) else "nope",
        "shared_intermediate_size": file.value(
            Key("feed_forward_length" if dense else "expert_shared_feed_forward_length")
        ),
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": inner // mamba_heads,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_conv_bias": any(
            file.has(f"blk.{layer}.ssm_conv1d.bias") for layer in range(config["num_hidden_layers"])
        ),
    }


_SINKS: Tensors = {f"{LAYER}.self_attn.sinks": "blk.{n}.attn_sinks.weight"}
_GRANITE_FIXED = routing(norm=True)
_SHARES = "expert_shared_feed_forward_length"


_LINEAR: dict[str, str | Key] = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_SPARSE = {**EXPERTS, **OWN_WIDTH, **SHARED_WIDTH}


def _delta(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ("linear_attention", "full_attention")
    listed = file.value(Key("attention.recurrent_layers", None)) is not None
    key = "attention.recurrent_layers" if listed else "full_attention_interval"
    return {
        "linear_value_head_dim": file.value(Key("ssm.inner_size")) // config["linear_num_value_heads"],
        "layer_types": by_layer(file, key, config, kinds, 4),
    }


def _of_pictures(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    sections = file.value(Key("rope.dimension_sections"))
    if not isinstance(sections, list) or len(sections) < 3:
        raise file.unsupported("rope.dimension_sections", sections)
    # Of text alone, the three sections have the same positions.
    return {"rope_parameters": {**config["rope_parameters"], "mrope_section": sections[:3], "mrope_interleaved": True}}


def _indexed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    ratios = per_layer(file, "attention.compress_ratios", config)
    kinds = ["indexed_attention" if kind == "full_attention" else kind for kind in config["layer_types"]]
    return {
        "layer_types": kinds,
        "indexer_compress_ratio": of_one_value(file, "attention.compress_ratios", ratios),
    }


def _grams(file: File, _config: Mapping[str, Any]) -> dict[str, Any]:
    """Embeddings of the last tokens together, which one layer adds."""
    layers = file.value(Key("ple.layers", None))
    if layers is None:
        return {"ple_layer_ids": []}
    size, heads = file.value(Key("ple.ngram_size")), file.value(Key("ple.heads_per_ngram"))
    sizes = file.value(Key("ple.head_vocab_sizes"))
    return {
        "ple_layer_ids": [layer + 1 for layer in (layers if isinstance(layers, list) else [layers])],
        "ngram_size": size,
        "heads_per_ngram": heads,
        "ple_embed_dim": file.value(Key("embedding_length_per_layer_input")) * (size - 1) * heads,
        "ple_conv_kernel_size": file.value(Key("ple.conv_kernel")),
        # The first of the primes that the sizes are.
        "ngram_vocab_size_base": min(sizes) if isinstance(sizes, list) else sizes,
        "make_ngram_vocab_size_divisible_by": file.shape("per_layer_token_embd.weight")[0],
        "eos_token_id": file.value(Key("ple.eos_token_id")),
    }


_DELTA_INDEXER = f"{LAYER}.self_attn.indexer"
_DELTAS: Tensors = {
    **ENDS,
    **ATTENTION,
    **FEED_FORWARD,
    **LOWERED_NORMS,
    f"{LAYER}.linear_attn.norm.weight": "blk.{n}.ssm_norm.weight",
}
_DELTA_EXPERTS = (
    experts() | shared_expert("mlp.shared_expert") | layer({"shared_expert_gate": "ffn_gate_inp_shexp"}, "mlp", "row")
)
_APART: Tensors = {
    **_DELTAS,
    f"{LAYER}.linear_attn.in_proj_qkv.weight": Made("delta_qkv", "blk.{n}.attn_qkv.weight"),
    f"{LAYER}.linear_attn.in_proj_z.weight": Made("delta_rows", "blk.{n}.attn_gate.weight"),
    f"{LAYER}.linear_attn.in_proj_a.weight": Made("delta_heads", "blk.{n}.ssm_alpha.weight"),
    f"{LAYER}.linear_attn.in_proj_b.weight": Made("delta_heads", "blk.{n}.ssm_beta.weight"),
    f"{LAYER}.linear_attn.conv1d.weight": Made("delta_convolution", "blk.{n}.ssm_conv1d.weight"),
    f"{LAYER}.linear_attn.dt_bias": Made("delta_numbers", "blk.{n}.ssm_dt.bias"),
    f"{LAYER}.linear_attn.A_log": Made("delta_logarithm", "blk.{n}.ssm_a"),
    f"{LAYER}.linear_attn.out_proj.weight": Made("delta_columns", "blk.{n}.ssm_out.weight"),
}


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
        architecture="jamba",
        model_type="jamba",
        layered=True,
        config={
            **EXPERTS,
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        constants={"mamba_conv_bias": True, "mamba_proj_bias": False},
        fixed={"expert_weights_scale": 1.0},
        computed=(_jamba,),
        tensors={
            **ends(norm="model.final_layernorm"),
            **layer({"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"}),
            **ATTENTION,
            **feed_forward("feed_forward"),
            **experts("feed_forward", router="router"),
            **layer(
                {
                    "in_proj": "ssm_in",
                    "x_proj": "ssm_x",
                    "dt_proj": "ssm_dt",
                    "dt_layernorm": "ssm_dt_norm",
                    "b_layernorm": "ssm_b_norm",
                    "c_layernorm": "ssm_c_norm",
                    "out_proj": "ssm_out",
                },
                "mamba",
            ),
            **layer({"conv1d": "ssm_conv1d"}, "mamba", "convolution"),
            f"{LAYER}.mamba.A_log": Made("logarithms", "blk.{n}.ssm_a"),
            f"{LAYER}.mamba.D": Made("flat", "blk.{n}.ssm_d"),
        },
    ),
    Gguf(
        architecture="nemotron_h",
        model_type="nemotron_h",
        layered=True,
        own_rope=True,  # none: whatever a file says of it, published ones something that does not fit the heads
        eps="attention.layer_norm_epsilon",
        config=_STATE,
        computed=(_nemotron,),
        tensors=_NEMOTRON,
    ),
    Gguf(
        architecture="nemotron_h_moe",
        model_type="nemotron_h",
        layered=True,
        own_rope=True,  # none: whatever a file says of it, published ones something that does not fit the heads
        eps="attention.layer_norm_epsilon",
        config={
            **_STATE,
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            **OWN_WIDTH,
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "n_shared_experts": Key("expert_shared_count", 1),
            "moe_latent_size": Key("moe_latent_size", None),
            "norm_topk_prob": Key("expert_weights_norm", False),
            **GROUPS,
        },
        fixed={"expert_gating_func": SIGMOID},
        computed=(_nemotron, scaled),
        tensors={
            **_NEMOTRON,
            **_in_mixer(
                experts("mixer")
                | correction("mixer.gate.e_score_correction_bias")
                | layer(
                    {
                        "shared_experts.up_proj": "ffn_up_shexp",
                        "shared_experts.down_proj": "ffn_down_shexp",
                        "fc1_latent_proj": "ffn_latent_down",
                        "fc2_latent_proj": "ffn_latent_up",
                    },
                    "mixer",
                )
            ),
        },
    ),
    Gguf(
        architecture="granite",
        model_type="granite",
        computed=(_multipliers,),
        tensors=DENSE | ROTATED_ATTENTION,
    ),
    # MiniCPM has the same multipliers.
    Gguf(
        architecture="minicpm",
        model_type="granite",
        when=lambda metadata: all(f"minicpm.{key}_scale" in metadata for key in ("embedding", "residual", "logit")),
        computed=(_multipliers,),
        tensors=DENSE | ROTATED_ATTENTION,
    ),
    Gguf(
        architecture="granite_swa",
        model_type="granite_swa",
        when=lambda metadata: not metadata.get("granite_swa.expert_count"),
        computed=(_multipliers, windows(), _thetas),
        tensors=DENSE | ROTATED_ATTENTION | _SINKS,
    ),
    Gguf(
        architecture="granite_swa",
        model_type="granitemoe_swa",
        when=lambda metadata: bool(metadata.get("granite_swa.expert_count")),
        config={**_GRANITE_EXPERTS, "shared_intermediate_size": Key(_SHARES, 0)},
        fixed=_GRANITE_FIXED,
        computed=(_multipliers, windows(), _thetas),
        tensors=ENDS
        | NORMS
        | ROTATED_ATTENTION
        | _SINKS
        | stacked_experts("block_sparse_moe.experts")
        | layer(
            {
                "shared_mlp.input_linear": "ffn_up_shexp",
                "shared_mlp.output_linear": "ffn_down_shexp",
                "block_sparse_moe.router": "ffn_gate_inp",
            }
        ),
    ),
    Gguf(
        architecture="granitemoe",
        model_type="granitemoe",
        when=lambda metadata: not metadata.get(f"granitemoe.{_SHARES}"),
        config=_GRANITE_EXPERTS,
        fixed=_GRANITE_FIXED,
        computed=(_multipliers,),
        tensors=_GRANITES,
    ),
    Gguf(
        architecture="granitemoe",
        model_type="granitemoeshared",
        when=lambda metadata: bool(metadata.get(f"granitemoe.{_SHARES}")),
        config={**_GRANITE_EXPERTS, "shared_intermediate_size": _SHARES},
        fixed=_GRANITE_FIXED,
        computed=(_multipliers,),
        tensors=_GRANITES | _GRANITE_SHARED,
    ),
    Gguf(
        architecture="granitehybrid",
        model_type="granitemoehybrid",
        layered=True,
        config={
            **_GRANITE_EXPERTS,
            "mamba_d_state": "ssm.state_size",
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_conv": "ssm.conv_kernel",
        },
        constants={"mamba_proj_bias": False, "mamba_chunk_size": 256},
        fixed=_GRANITE_FIXED,
        computed=(_multipliers, heads_of_some("mamba", "attention"), _hybrid),
        tensors={
            **_GRANITES,
            **_GRANITE_SHARED,
            **mamba_2("mamba"),
        },
    ),
    Gguf(
        architecture="qwen35",
        model_type="qwen3_5_text",
        partial_rotary=True,
        config=_LINEAR,
        computed=(_delta, _of_pictures),
        tensors=_APART,
    ),
    Gguf(
        architecture="qwen35moe",
        model_type="qwen3_5_moe_text",
        partial_rotary=True,
        config={**_SPARSE, **_LINEAR},
        fixed=routing(norm=True),
        computed=(_delta, _of_pictures),
        tensors=_APART | _DELTA_EXPERTS,
    ),
    Gguf(
        architecture="qwen3next",
        model_type="qwen3_next",
        partial_rotary=True,
        config={**_SPARSE, **_LINEAR},
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        fixed=routing(norm=True),
        computed=(_delta,),
        tensors={
            **_DELTAS,
            **_DELTA_EXPERTS,
            f"{LAYER}.linear_attn.in_proj_qkvz.weight": (
                "blk.{n}.ssm_in.weight",  # in older files
                Made("by_key_head", "blk.{n}.attn_qkv.weight", "blk.{n}.attn_gate.weight"),
            ),
            f"{LAYER}.linear_attn.in_proj_ba.weight": "blk.{n}.ssm_ba.weight",
            f"{LAYER}.linear_attn.conv1d.weight": Made("convolution", "blk.{n}.ssm_conv1d.weight"),
            f"{LAYER}.linear_attn.dt_bias": "blk.{n}.ssm_dt.bias",
            f"{LAYER}.linear_attn.A_log": Made("logarithm", "blk.{n}.ssm_a"),
            f"{LAYER}.linear_attn.out_proj.weight": "blk.{n}.ssm_out.weight",
        },
    ),
    Gguf(
        architecture="qwen4exp",
        model_type="qwen4_exp_text",
        partial_rotary=True,
        config={
            **_SPARSE,
            **_LINEAR,
            "hc_count": "hyper_connection.count",
            "hc_lowrank": "hyper_connection.low_rank",
            "indexer_n_heads": "attention.indexer.head_count",
            "indexer_head_dim": "attention.indexer.key_length",
            "indexer_budget": "attention.indexer.top_k",
        },
        constants={"indexer_kv_heads": 1, "norm_topk_prob": True, "output_gate_type": "sigmoid"},
        fixed=routing(norm=True),
        computed=(_delta, _of_pictures, _indexed, _grams),
        tensors={
            **{name: made for name, made in _APART.items() if not name.endswith("layernorm.weight")},
            **_DELTA_EXPERTS,
            **{
                f"{theirs}.{part}.weight": f"{ours}_{kind}.weight"
                for theirs, ours in {
                    f"{LAYER}.attn_hyper_connection": "blk.{n}.hc_attn",
                    f"{LAYER}.mlp_hyper_connection": "blk.{n}.hc_ffn",
                    "model.hyper_connection_mixer": "output_hc",
                }.items()
                for part, kind in {
                    "input_mix_weight_down": "down",
                    "input_mix_weight_up": "up",
                    "block_inject_weight": "inject",
                }.items()
            },
            f"{LAYER}.attn_hyper_connection.hc_norm.weight": Made("lowered_flat", "blk.{n}.hc_attn_norm.weight"),
            f"{LAYER}.mlp_hyper_connection.hc_norm.weight": Made("lowered_flat", "blk.{n}.hc_ffn_norm.weight"),
            "model.hyper_connection_mixer.hc_norm.weight": Made("lowered_flat", "output_hc_norm.weight"),
            f"{_DELTA_INDEXER}.index_qk_proj.weight": Made(
                "joined", "blk.{n}.indexer.q_proj.weight", "blk.{n}.indexer.k_proj.weight"
            ),
            f"{_DELTA_INDEXER}.q_layernorm.weight": Made("lowered", "blk.{n}.indexer.q_norm.weight"),
            f"{_DELTA_INDEXER}.k_layernorm.weight": Made("lowered", "blk.{n}.indexer.k_norm.weight"),
            # llama.cpp keeps one table, of one layer, which only that layer's projections tell.
            **{
                f"{LAYER}.ple.ple_embedding.{theirs}": Made("first", ours, "blk.{n}.ple_key.weight")
                for theirs, ours in {
                    "ngram_embedding.weight": "per_layer_token_embd.weight",
                    "layer_multipliers": f"{ARRAY}ple.layer_multipliers",
                    "ngram_heads_offsets": f"{ARRAY}ple.head_offsets",
                    "ngram_heads_vocab_sizes": f"{ARRAY}ple.head_vocab_sizes",
                }.items()
            },
            **layer({"key_proj": "ple_key", "value_proj": "ple_value"}, "ple"),
            **layer({f"norm_{part}": f"ple_norm_{part}" for part in ("key", "query", "conv")}, "ple", "lowered_flat"),
            **layer({"conv1d": "ple_conv1d"}, "ple", "convolution"),
        },
    ),
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
            **GROUPS,
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
            **GROUPS,
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
