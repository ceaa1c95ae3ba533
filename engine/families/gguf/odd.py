"""Families of which each is odd in a way of its own: DBRX, Gemma (its text), gpt-oss, Llama 4, Phi, and encoders."""

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
    LOCAL_EXPERTS,
    LOWERED_NORMS,
    NORMS,
    NORMS_AROUND,
    SIGMOID,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    File,
    Gguf,
    Key,
    Made,
    Tensors,
    both,
    by_layer,
    experts,
    feed_forward,
    layer,
    longrope,
    of_one_value,
    per_layer,
    routing,
    shared_expert,
    stacked_experts,
    two_thetas,
    windows,
)

_BLOCK = "transformer.blocks.{n}"
_NORM_ATTENTION = f"{_BLOCK}.norm_attn_norm"


def _dbrx(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    theta = config["rope_parameters"]["rope_theta"]
    return {
        "d_model": config["hidden_size"],
        "n_heads": config["num_attention_heads"],
        "n_layers": config["num_hidden_layers"],
        "max_seq_len": config["max_position_embeddings"],
        "attn_config": {
            "kv_n_heads": config["num_key_value_heads"],
            "clip_qkv": file.value(Key("attention.clamp_kqv")),
            "rope_theta": theta,
        },
        "ffn_config": {
            "ffn_hidden_size": config["intermediate_size"],
            "hidden_size": config["hidden_size"],
            "moe_num_experts": file.value(Key("expert_count")),
            "moe_top_k": file.value(Key("expert_used_count")),
            "moe_normalize_expert_weights": 1.0,
            "ffn_act_fn": {"name": "silu"},
        },
    }


_ALTERNATING = f"{LAYER}.mlp.experts"


def _unrounded_rope(_file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        # The ends of YaRN's ramp are not rounded in gpt-oss (OpenAI's and the library's code); llama.cpp rounds them.
        rope["truncate"] = False
    return {"rope_parameters": rope}


_MAVERICK = 128
"""Experts of the one model whose queries and keys have no norm: llama.cpp tells it by them."""


def _llama4(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, step = range(config["num_hidden_layers"]), config["interleave_moe_layer_step"]
    rotated = [int((layer + 1) % 4 != 0) for layer in layers]
    return {
        "intermediate_size_mlp": file.value(Key("feed_forward_length")),
        "moe_layers": [layer for layer in layers if (layer + 1) % step == 0],
        "no_rope_layers": rotated,
        "layer_types": ["chunked_attention" if rope else "full_attention" for rope in rotated],
        "use_qk_norm": config["num_local_experts"] != _MAVERICK,
    }


_LLAMA4_EXPERTS = f"{LAYER}.feed_forward.experts"


_PHIMOE_SCALE = 1.243163121016122
"""Of the rotary embedding of Phi-3.5-MoE, short and long; its files have what Phi-3's formula makes of its lengths."""


def _phi3(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = longrope(file, config) or file.rope()
    rotated = file.value(Key("rope.dimension_count", config["head_dim"]))
    return {
        "rope_parameters": {**rope, "partial_rotary_factor": rotated / config["head_dim"]},
        "original_max_position_embeddings": rope.get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        ),
        # 0 is none. llama.cpp leaves the windows of this architecture out; the model has them.
        "sliding_window": file.value(Key("attention.sliding_window", 0)) or None,
    }


def _phimoe(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = longrope(file, config)
    if rope is not None:
        scale = rope.pop("attention_factor")
        if (config["max_position_embeddings"], rope["original_max_position_embeddings"]) == (131_072, 4096):
            scale = _PHIMOE_SCALE
        rope["short_mscale"] = rope["long_mscale"] = scale
    return {
        "rope_parameters": rope or file.rope(),
        "lm_head_bias": file.has("output.bias"),
        "sliding_window": None,
    }


_EPSILON = "attention.layer_norm_epsilon"
_BERT_ENDS: Tensors = {
    **both("embeddings.word_embeddings", "token_embd"),
    **both("embeddings.position_embeddings", "position_embd"),
    **both("embeddings.token_type_embeddings", "token_types"),
    **both("embeddings.LayerNorm", "token_embd_norm"),
}


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
        architecture="dbrx",
        model_type="dbrx",
        eps="attention.layer_norm_epsilon",
        # The library's code has this epsilon.
        fixed={**routing(norm=True), "attention.layer_norm_epsilon": 1e-5},
        computed=(_dbrx,),
        tensors={
            "transformer.wte.weight": "token_embd.weight",
            "transformer.norm_f.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
            f"{_NORM_ATTENTION}.attn.Wqkv.weight": "blk.{n}.attn_qkv.weight",
            f"{_NORM_ATTENTION}.attn.out_proj.weight": "blk.{n}.attn_output.weight",
            f"{_NORM_ATTENTION}.norm_1.weight": "blk.{n}.attn_norm.weight",
            f"{_NORM_ATTENTION}.norm_2.weight": "blk.{n}.attn_output_norm.weight",
            f"{_BLOCK}.ffn.router.layer.weight": "blk.{n}.ffn_gate_inp.weight",
            f"{_BLOCK}.ffn.experts.mlp.w1": Made("below", "blk.{n}.ffn_gate_exps.weight"),
            f"{_BLOCK}.ffn.experts.mlp.v1": Made("below", "blk.{n}.ffn_up_exps.weight"),
            f"{_BLOCK}.ffn.experts.mlp.w2": Made("below_transposed", "blk.{n}.ffn_down_exps.weight"),
        },
    ),
    Gguf(
        architecture="gpt-oss",
        model_type="gpt_oss",
        config={
            **LOCAL_EXPERTS,
            "sliding_window": "attention.sliding_window",
            "intermediate_size": "expert_feed_forward_length",
        },
        constants={"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": True},
        fixed={"expert_gating_func": SOFTMAX_OF_CHOSEN, "expert_weights_scale": 1.0},
        computed=(_unrounded_rope, windows(2)),
        tensors={
            **ENDS,
            **NORMS_AROUND,
            **ATTENTION,
            f"{LAYER}.self_attn.sinks": "blk.{n}.attn_sinks.weight",
            **layer({"mlp.router": "ffn_gate_inp"}),
            f"{_ALTERNATING}.gate_up_proj": Made(
                "alternating_transposed", "blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_up_exps.weight"
            ),
            f"{_ALTERNATING}.gate_up_proj_bias": Made(
                "alternating_numbers", "blk.{n}.ffn_gate_exps.bias", "blk.{n}.ffn_up_exps.bias"
            ),
            f"{_ALTERNATING}.down_proj": Made("joined_transposed", "blk.{n}.ffn_down_exps.weight"),
            f"{_ALTERNATING}.down_proj_bias": "blk.{n}.ffn_down_exps.bias",
        },
    ),
    Gguf(
        architecture="llama4",
        model_type="llama4_text",
        config={
            **LOCAL_EXPERTS,
            "intermediate_size": "expert_feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        constants={
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        fixed={"expert_gating_func": SIGMOID, "expert_weights_scale": 1.0, "attention.sliding_window": 8192},
        computed=(_llama4,),
        tensors={
            **ENDS,
            **NORMS,
            **ATTENTION,
            **feed_forward("feed_forward"),
            **shared_expert("feed_forward.shared_expert"),
            f"{LAYER}.feed_forward.router.weight": "blk.{n}.ffn_gate_inp.weight",
            f"{_LLAMA4_EXPERTS}.gate_up_proj": Made(
                "joined_transposed", "blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_up_exps.weight"
            ),
            f"{_LLAMA4_EXPERTS}.down_proj": Made("joined_transposed", "blk.{n}.ffn_down_exps.weight"),
        },
    ),
    Gguf(
        architecture="phi3",
        model_type="phi3",
        own_rope=True,
        computed=(_phi3,),
        tensors=ENDS
        | NORMS
        | {
            f"{LAYER}.self_attn.qkv_proj.weight": (
                "blk.{n}.attn_qkv.weight",
                Made("joined", *(f"blk.{{n}}.attn_{part}.weight" for part in "qkv")),
            )
        }
        | layer({"self_attn.o_proj": "attn_output", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}),
    ),
    Gguf(
        architecture="phimoe",
        model_type="phimoe",
        own_rope=True,
        config=LOCAL_EXPERTS,
        constants={"router_jitter_noise": 0.01, "input_jitter_noise": 0.0},
        # llama.cpp scales two experts' weights to a sum of 1, and its norms do not subtract the mean. The model's
        # makers, and the library, mix experts as in "SparseMixer" (Liu, Gao and Chen 2023), in which each weight is
        # nearly 1, and have layer norms. With both changed, the library computes what llama.cpp does.
        fixed=routing(norm=True),
        computed=(_phimoe,),
        tensors=ENDS | NORMS | ATTENTION | experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    Gguf(
        architecture="bert",
        model_type="bert",
        eps=_EPSILON,
        own_rope=True,  # positions are a table
        config={"layer_norm_eps": _EPSILON},
        constants={"hidden_act": "gelu", "architectures": ["BertModel"]},
        fixed={"attention.causal": False},
        tensors=_BERT_ENDS
        | layer(
            place="encoder.layer.{n}",
            names={
                "attention.self.query": "attn_q",
                "attention.self.key": "attn_k",
                "attention.self.value": "attn_v",
                "attention.output.dense": "attn_output",
                "attention.output.LayerNorm": "attn_output_norm",
                "intermediate.dense": "ffn_up",
                "output.dense": "ffn_down",
                "output.LayerNorm": "layer_output_norm",
            },
        ),
    ),
    Gguf(
        architecture="nomic-bert",
        model_type="nomic_bert",
        eps=_EPSILON,
        config={"layer_norm_eps": _EPSILON, "max_position_embeddings": Key("context_length")},
        constants={"architectures": ["NomicBertModel"]},
        fixed={"attention.causal": False},
        tensors=_BERT_ENDS
        | layer(
            place="layers.{n}",
            names={
                "self_attn.q_proj": "attn_q",
                "self_attn.k_proj": "attn_k",
                "self_attn.v_proj": "attn_v",
                "self_attn.o_proj": "attn_output",
                "post_attention_layernorm": "attn_output_norm",
                "mlp.gate_proj": "ffn_gate",
                "mlp.up_proj": "ffn_up",
                "mlp.down_proj": "ffn_down",
                "post_mlp_layernorm": "layer_output_norm",
            },
        ),
    ),
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
