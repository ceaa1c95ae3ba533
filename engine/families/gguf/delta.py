"""What the GGUF files of Qwen3-Next and Qwen3.5 share: linear attention between layers of attention, norms plus one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import ATTENTION, ENDS, LAYER, File, Key, Made, Tensors, by_layer, experts, shared_expert

CONFIG: dict[str, str | Key] = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}


def delta(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of heads, and which layers are of which kind."""
    kinds = ("linear_attention", "full_attention")
    listed = file.value(Key("attention.recurrent_layers", None)) is not None
    key = "attention.recurrent_layers" if listed else "full_attention_interval"
    return {
        "linear_value_head_dim": file.value(Key("ssm.inner_size")) // config["linear_num_value_heads"],
        "layer_types": by_layer(file, key, config, kinds, 4),
    }


def _norm(theirs: str, ours: str) -> Tensors:
    return {f"{theirs}.weight": Made("lowered", f"{ours}.weight")}


TENSORS: Tensors = {
    **ENDS,
    **ATTENTION,
    **_norm("model.norm", "output_norm"),
    **_norm(f"{LAYER}.input_layernorm", "blk.{n}.attn_norm"),
    **_norm(f"{LAYER}.post_attention_layernorm", "blk.{n}.post_attention_norm"),
    **_norm(f"{LAYER}.self_attn.q_norm", "blk.{n}.attn_q_norm"),
    **_norm(f"{LAYER}.self_attn.k_norm", "blk.{n}.attn_k_norm"),
    **experts(),
    **shared_expert("mlp.shared_expert"),
    f"{LAYER}.mlp.shared_expert_gate.weight": Made("row", "blk.{n}.ffn_gate_inp_shexp.weight"),
    f"{LAYER}.linear_attn.norm.weight": "blk.{n}.ssm_norm.weight",
}
