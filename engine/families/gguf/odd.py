"""Families of which each is odd in a way of its own: DBRX, gpt-oss, Llama 4, Phi, and encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ATTENTION,
    ENDS,
    LAYER,
    LOCAL_EXPERTS,
    NORMS,
    NORMS_AROUND,
    SIGMOID,
    SOFTMAX_OF_CHOSEN,
    File,
    Gguf,
    Key,
    Made,
    Tensors,
    both,
    experts,
    feed_forward,
    layer,
    longrope,
    routing,
    shared_expert,
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
)
