"""Llama 4, with or without what reads pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ATTENTION,
    ENDS,
    LAYER,
    LOCAL_EXPERTS,
    NORMS,
    SIGMOID,
    File,
    Gguf,
    Key,
    Made,
    feed_forward,
    shared_expert,
)

_MAVERICK = 128
"""Experts of the one model whose queries and keys have no norm: llama.cpp tells it by them."""


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, step = range(config["num_hidden_layers"]), config["interleave_moe_layer_step"]
    rotated = [int((layer + 1) % 4 != 0) for layer in layers]
    return {
        "intermediate_size_mlp": file.value(Key("feed_forward_length")),
        "moe_layers": [layer for layer in layers if (layer + 1) % step == 0],
        "no_rope_layers": rotated,
        "layer_types": ["chunked_attention" if rope else "full_attention" for rope in rotated],
        "use_qk_norm": config["num_local_experts"] != _MAVERICK,
    }


_EXPERTS = f"{LAYER}.feed_forward.experts"

ROWS = (
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
        computed=(_computed,),
        tensors={
            **ENDS,
            **NORMS,
            **ATTENTION,
            **feed_forward("feed_forward"),
            **shared_expert("feed_forward.shared_expert"),
            f"{LAYER}.feed_forward.router.weight": "blk.{n}.ffn_gate_inp.weight",
            f"{_EXPERTS}.gate_up_proj": Made(
                "joined_transposed", "blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_up_exps.weight"
            ),
            f"{_EXPERTS}.down_proj": Made("joined_transposed", "blk.{n}.ffn_down_exps.weight"),
        },
    ),
)
