"""gpt-oss: sinks, a router with biases, and experts whose gates and ups alternate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ATTENTION,
    ENDS,
    LAYER,
    LOCAL_EXPERTS,
    NORMS_AROUND,
    SOFTMAX_OF_CHOSEN,
    File,
    Gguf,
    Made,
    layer,
    windows,
)

_EXPERTS = f"{LAYER}.mlp.experts"


def _rope(_file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        # The ends of YaRN's ramp are not rounded in gpt-oss (OpenAI's and the library's code); llama.cpp rounds them.
        rope["truncate"] = False
    return {"rope_parameters": rope}


ROWS = (
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
        computed=(_rope, windows(2)),
        tensors={
            **ENDS,
            **NORMS_AROUND,
            **ATTENTION,
            f"{LAYER}.self_attn.sinks": "blk.{n}.attn_sinks.weight",
            **layer({"mlp.router": "ffn_gate_inp"}),
            f"{_EXPERTS}.gate_up_proj": Made(
                "alternating_transposed", "blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_up_exps.weight"
            ),
            f"{_EXPERTS}.gate_up_proj_bias": Made(
                "alternating_numbers", "blk.{n}.ffn_gate_exps.bias", "blk.{n}.ffn_up_exps.bias"
            ),
            f"{_EXPERTS}.down_proj": Made("joined_transposed", "blk.{n}.ffn_down_exps.weight"),
            f"{_EXPERTS}.down_proj_bias": "blk.{n}.ffn_down_exps.bias",
        },
    ),
)
