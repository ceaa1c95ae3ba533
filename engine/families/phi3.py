"""Phi-3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import Family
from engine.families.gguf import ENDS, LAYER, NORMS, File, Gguf, Key, Made, longrope


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
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


FAMILY = Family(
    rotates_again=True,
    gguf=Gguf(
        architecture="phi3",
        own_rope=True,
        computed=_computed,
        tensors={
            **ENDS,
            **NORMS,
            f"{LAYER}.self_attn.qkv_proj.weight": (
                "blk.{n}.attn_qkv.weight",
                Made("joined", *(f"blk.{{n}}.attn_{part}.weight" for part in "qkv")),
            ),
            f"{LAYER}.self_attn.o_proj.weight": "blk.{n}.attn_output.weight",
            f"{LAYER}.mlp.gate_up_proj.weight": "blk.{n}.ffn_up.weight",
            f"{LAYER}.mlp.down_proj.weight": "blk.{n}.ffn_down.weight",
        },
    ),
)
