"""What Granite's GGUF files share: four multipliers, and experts whose gates and ups lie in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import ENDS, LAYER, NORMS, ROTATED_ATTENTION, SOFTMAX, File, Key, Made, Tensors

FIXED = {"expert_weights_norm": True, "expert_gating_func": SOFTMAX, "expert_weights_scale": 1.0}


def multipliers(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp takes 0, and none, as no multiplier."""
    return {
        "embedding_multiplier": file.value(Key("embedding_scale", 0.0)) or 1.0,
        "residual_multiplier": file.value(Key("residual_scale", 0.0)) or 1.0,
        "logits_scaling": file.value(Key("logit_scale", 0.0)) or 1.0,
        "attention_multiplier": file.value(Key("attention.scale", 0.0)) or config["head_dim"] ** -0.5,
    }


CONFIG: dict[str, str | Key] = {
    "num_local_experts": Key("expert_count", 0),
    "num_experts_per_tok": Key("expert_used_count", 0),
}
TENSORS: Tensors = {
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
SHARED: Tensors = {
    f"{LAYER}.shared_mlp.input_linear.weight": (
        Made("joined", "blk.{n}.ffn_gate_shexp.weight", "blk.{n}.ffn_up_shexp.weight"),
        Made("joined", "blk.{n}.ffn_gate.weight", "blk.{n}.ffn_up.weight"),
    ),
    f"{LAYER}.shared_mlp.output_linear.weight": ("blk.{n}.ffn_down_shexp.weight", "blk.{n}.ffn_down.weight"),
}
"""The expert of every token, or the only one of a dense model."""
