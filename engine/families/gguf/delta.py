"""Qwen3-Next and Qwen3.5: linear attention between layers of attention, norms that multiply by one more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ARRAY,
    ATTENTION,
    ENDS,
    EXPERTS,
    FEED_FORWARD,
    LAYER,
    LOWERED_NORMS,
    OWN_WIDTH,
    SHARED_WIDTH,
    File,
    Gguf,
    Key,
    Made,
    Tensors,
    by_layer,
    experts,
    layer,
    of_one_value,
    per_layer,
    routing,
    shared_expert,
)

_LINEAR: dict[str, str | Key] = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_SPARSE = {**EXPERTS, **OWN_WIDTH, **SHARED_WIDTH}


def _delta(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of heads, and which layers are of which kind."""
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


_INDEXER = f"{LAYER}.self_attn.indexer"
_TENSORS: Tensors = {
    **ENDS,
    **ATTENTION,
    **FEED_FORWARD,
    **LOWERED_NORMS,
    f"{LAYER}.linear_attn.norm.weight": "blk.{n}.ssm_norm.weight",
}
_EXPERTS = (
    experts() | shared_expert("mlp.shared_expert") | layer({"shared_expert_gate": "ffn_gate_inp_shexp"}, "mlp", "row")
)
_APART: Tensors = {
    **_TENSORS,
    f"{LAYER}.linear_attn.in_proj_qkv.weight": Made("delta_qkv", "blk.{n}.attn_qkv.weight"),
    f"{LAYER}.linear_attn.in_proj_z.weight": Made("delta_rows", "blk.{n}.attn_gate.weight"),
    f"{LAYER}.linear_attn.in_proj_a.weight": Made("delta_heads", "blk.{n}.ssm_alpha.weight"),
    f"{LAYER}.linear_attn.in_proj_b.weight": Made("delta_heads", "blk.{n}.ssm_beta.weight"),
    f"{LAYER}.linear_attn.conv1d.weight": Made("delta_convolution", "blk.{n}.ssm_conv1d.weight"),
    f"{LAYER}.linear_attn.dt_bias": Made("delta_numbers", "blk.{n}.ssm_dt.bias"),
    f"{LAYER}.linear_attn.A_log": Made("delta_logarithm", "blk.{n}.ssm_a"),
    f"{LAYER}.linear_attn.out_proj.weight": Made("delta_columns", "blk.{n}.ssm_out.weight"),
}

ROWS = (
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
        tensors=_APART | _EXPERTS,
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
            **_TENSORS,
            **_EXPERTS,
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
            **_EXPERTS,
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
            f"{_INDEXER}.index_qk_proj.weight": Made(
                "joined", "blk.{n}.indexer.q_proj.weight", "blk.{n}.indexer.k_proj.weight"
            ),
            f"{_INDEXER}.q_layernorm.weight": Made("lowered", "blk.{n}.indexer.q_norm.weight"),
            f"{_INDEXER}.k_layernorm.weight": Made("lowered", "blk.{n}.indexer.k_norm.weight"),
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
)
