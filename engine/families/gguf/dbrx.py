"""DBRX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import File, Gguf, Key, Made, routing

_BLOCK = "transformer.blocks.{n}"
_ATTENTION = f"{_BLOCK}.norm_attn_norm"


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
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


ROWS = (
    Gguf(
        architecture="dbrx",
        model_type="dbrx",
        eps="attention.layer_norm_epsilon",
        # The library's code has this epsilon.
        fixed={**routing(norm=True), "attention.layer_norm_epsilon": 1e-5},
        computed=(_computed,),
        tensors={
            "transformer.wte.weight": "token_embd.weight",
            "transformer.norm_f.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
            f"{_ATTENTION}.attn.Wqkv.weight": "blk.{n}.attn_qkv.weight",
            f"{_ATTENTION}.attn.out_proj.weight": "blk.{n}.attn_output.weight",
            f"{_ATTENTION}.norm_1.weight": "blk.{n}.attn_norm.weight",
            f"{_ATTENTION}.norm_2.weight": "blk.{n}.attn_output_norm.weight",
            f"{_BLOCK}.ffn.router.layer.weight": "blk.{n}.ffn_gate_inp.weight",
            f"{_BLOCK}.ffn.experts.mlp.w1": Made("below", "blk.{n}.ffn_gate_exps.weight"),
            f"{_BLOCK}.ffn.experts.mlp.v1": Made("below", "blk.{n}.ffn_up_exps.weight"),
            f"{_BLOCK}.ffn.experts.mlp.w2": Made("below_transposed", "blk.{n}.ffn_down_exps.weight"),
        },
    ),
)
