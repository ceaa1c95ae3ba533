"""Phi-3 and Phi-3.5-MoE: rotary embeddings for short and for long contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ATTENTION,
    ENDS,
    LAYER,
    LOCAL_EXPERTS,
    NORMS,
    File,
    Gguf,
    Key,
    Made,
    experts,
    layer,
    longrope,
    routing,
)

_SCALE = 1.243163121016122
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
            scale = _SCALE
        rope["short_mscale"] = rope["long_mscale"] = scale
    return {
        "rope_parameters": rope or file.rope(),
        "lm_head_bias": file.has("output.bias"),
        "sliding_window": None,
    }


ROWS = (
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
)
