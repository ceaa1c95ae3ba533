"""Granite: four multipliers, experts whose gates and ups lie in one tensor, and, in Granite 4.0, Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    DENSE,
    ENDS,
    LAYER,
    NORMS,
    ROTATED_ATTENTION,
    File,
    Gguf,
    Key,
    Made,
    Tensors,
    heads_of_some,
    layer,
    per_layer,
    routing,
    stacked_experts,
    windows,
)
from engine.families.gguf.mamba import mamba_2


def _multipliers(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp takes 0, and none, as no multiplier."""
    return {
        "embedding_multiplier": file.value(Key("embedding_scale", 0.0)) or 1.0,
        "residual_multiplier": file.value(Key("residual_scale", 0.0)) or 1.0,
        "logits_scaling": file.value(Key("logit_scale", 0.0)) or 1.0,
        "attention_multiplier": file.value(Key("attention.scale", 0.0)) or config["head_dim"] ** -0.5,
    }


def _thetas(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    theta, layers = config["rope_parameters"]["rope_theta"], config["num_hidden_layers"]
    rotated = per_layer(file, "attention.rope_pattern", config, True)
    return {"layer_rope_theta": [theta if each else 0.0 for each in rotated[:layers]]}


_CONFIG: dict[str, str | Key] = {
    "num_local_experts": Key("expert_count", 0),
    "num_experts_per_tok": Key("expert_used_count", 0),
}
_TENSORS: Tensors = {
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
_SHARED: Tensors = {
    f"{LAYER}.shared_mlp.input_linear.weight": (
        Made("joined", "blk.{n}.ffn_gate_shexp.weight", "blk.{n}.ffn_up_shexp.weight"),
        Made("joined", "blk.{n}.ffn_gate.weight", "blk.{n}.ffn_up.weight"),
    ),
    f"{LAYER}.shared_mlp.output_linear.weight": ("blk.{n}.ffn_down_shexp.weight", "blk.{n}.ffn_down.weight"),
}
"""The expert of every token, or the only one of a dense model."""


def _hybrid(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    inner, mamba_heads = file.value(Key("ssm.inner_size")), file.value(Key("ssm.time_step_rank"))
    dense = not config["num_local_experts"]
    return {
        # This key is llama.cpp's switch for rotary embeddings in these models.
        "position_embedding_type": "rope" if file.value(Key("rope.scaling.finetuned", True)) else "nope",
        "shared_intermediate_size": file.value(
            Key("feed_forward_length" if dense else "expert_shared_feed_forward_length")
        ),
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": inner // mamba_heads,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_conv_bias": any(
            file.has(f"blk.{layer}.ssm_conv1d.bias") for layer in range(config["num_hidden_layers"])
        ),
    }


_SINKS: Tensors = {f"{LAYER}.self_attn.sinks": "blk.{n}.attn_sinks.weight"}
_FIXED = routing(norm=True)
_SHARES = "expert_shared_feed_forward_length"

ROWS = (
    Gguf(
        architecture="granite",
        model_type="granite",
        computed=(_multipliers,),
        tensors=DENSE | ROTATED_ATTENTION,
    ),
    # MiniCPM has the same multipliers.
    Gguf(
        architecture="minicpm",
        model_type="granite",
        when=lambda metadata: all(f"minicpm.{key}_scale" in metadata for key in ("embedding", "residual", "logit")),
        computed=(_multipliers,),
        tensors=DENSE | ROTATED_ATTENTION,
    ),
    Gguf(
        architecture="granite_swa",
        model_type="granite_swa",
        when=lambda metadata: not metadata.get("granite_swa.expert_count"),
        computed=(_multipliers, windows(), _thetas),
        tensors=DENSE | ROTATED_ATTENTION | _SINKS,
    ),
    Gguf(
        architecture="granite_swa",
        model_type="granitemoe_swa",
        when=lambda metadata: bool(metadata.get("granite_swa.expert_count")),
        config={**_CONFIG, "shared_intermediate_size": Key(_SHARES, 0)},
        fixed=_FIXED,
        computed=(_multipliers, windows(), _thetas),
        tensors=ENDS
        | NORMS
        | ROTATED_ATTENTION
        | _SINKS
        | stacked_experts("block_sparse_moe.experts")
        | layer(
            {
                "shared_mlp.input_linear": "ffn_up_shexp",
                "shared_mlp.output_linear": "ffn_down_shexp",
                "block_sparse_moe.router": "ffn_gate_inp",
            }
        ),
    ),
    Gguf(
        architecture="granitemoe",
        model_type="granitemoe",
        when=lambda metadata: not metadata.get(f"granitemoe.{_SHARES}"),
        config=_CONFIG,
        fixed=_FIXED,
        computed=(_multipliers,),
        tensors=_TENSORS,
    ),
    Gguf(
        architecture="granitemoe",
        model_type="granitemoeshared",
        when=lambda metadata: bool(metadata.get(f"granitemoe.{_SHARES}")),
        config={**_CONFIG, "shared_intermediate_size": _SHARES},
        fixed=_FIXED,
        computed=(_multipliers,),
        tensors=_TENSORS | _SHARED,
    ),
    Gguf(
        architecture="granitehybrid",
        model_type="granitemoehybrid",
        layered=True,
        config={
            **_CONFIG,
            "mamba_d_state": "ssm.state_size",
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_conv": "ssm.conv_kernel",
        },
        constants={"mamba_proj_bias": False, "mamba_chunk_size": 256},
        fixed=_FIXED,
        computed=(_multipliers, heads_of_some("mamba", "attention"), _hybrid),
        tensors={
            **_TENSORS,
            **_SHARED,
            **mamba_2("mamba"),
        },
    ),
)
