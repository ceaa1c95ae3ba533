"""Phi-3.5-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import Family
from engine.families.gguf import ATTENTION, ENDS, NORMS, File, Gguf, experts, longrope, routing

_SCALE = 1.243163121016122
"""Of the rotary embedding of Phi-3.5-MoE, short and long; its files have what Phi-3's formula makes of its lengths."""


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
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


FAMILY = Family(
    rotates_again=True,
    gguf=Gguf(
        architecture="phimoe",
        own_rope=True,
        config={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        constants={"router_jitter_noise": 0.01, "input_jitter_noise": 0.0},
        # llama.cpp scales two experts' weights to a sum of 1, and its norms do not subtract the mean. The model's
        # makers, and the library, mix experts as in "SparseMixer" (Liu, Gao and Chen 2023), in which each weight is
        # nearly 1, and have layer norms. With both changed, the library computes what llama.cpp does.
        fixed=routing(norm=True),
        computed=_computed,
        tensors={**ENDS, **NORMS, **ATTENTION, **experts("block_sparse_moe", gate="w1", up="w3", down="w2")},
    ),
    mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
