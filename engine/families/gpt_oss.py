"""gpt-oss: sinks (a logit per head of attending to nothing), norms that round once, and a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import ClampedGate, Family, FastPath, Router
from engine.families.gguf import ATTENTION, ENDS, LAYER, NORMS, SOFTMAX_OF_CHOSEN, File, Gguf, Made, both, by_layer
from engine.families.replies import HARMONY


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        # The ends of YaRN's ramp are not rounded in gpt-oss (OpenAI's and the library's code); llama.cpp rounds them.
        rope["truncate"] = False
    kinds = ("sliding_attention", "full_attention")
    return {
        "rope_parameters": rope,
        "layer_types": by_layer(file, "attention.sliding_window_pattern", config, kinds, 2),
    }


FAMILY = Family(
    replies=HARMONY,
    packs_rows=True,
    fast_path=FastPath(
        model="GptOssForCausalLM",
        layer="GptOssDecoderLayer",
        attention="GptOssAttention",
        angles="once",
        block="GptOssMLP",
        # A softmax over the chosen logits is one over all of them, made to sum to 1.
        router=Router(bias="bias", normalise=True, bf16_shares=True),
    ),
    gate=ClampedGate("alternating", "limit", "alpha"),
    gguf=Gguf(
        architecture="gpt-oss",
        config={
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "sliding_window": "attention.sliding_window",
            "intermediate_size": "expert_feed_forward_length",
        },
        constants={"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": True},
        fixed={"expert_gating_func": SOFTMAX_OF_CHOSEN, "expert_weights_scale": 1.0},
        computed=_computed,
        tensors={
            **ENDS,
            **NORMS,
            **both(f"{LAYER}.post_attention_layernorm", "blk.{n}.post_attention_norm"),
            **ATTENTION,
            f"{LAYER}.self_attn.sinks": "blk.{n}.attn_sinks.weight",
            **both(f"{LAYER}.mlp.router", "blk.{n}.ffn_gate_inp"),
            f"{LAYER}.mlp.experts.gate_up_proj": Made(
                "alternating_transposed", "blk.{n}.ffn_gate_exps.weight", "blk.{n}.ffn_up_exps.weight"
            ),
            f"{LAYER}.mlp.experts.gate_up_proj_bias": Made(
                "alternating_numbers", "blk.{n}.ffn_gate_exps.bias", "blk.{n}.ffn_up_exps.bias"
            ),
            f"{LAYER}.mlp.experts.down_proj": Made("joined_transposed", "blk.{n}.ffn_down_exps.weight"),
            f"{LAYER}.mlp.experts.down_proj_bias": "blk.{n}.ffn_down_exps.bias",
        },
    ),
)
