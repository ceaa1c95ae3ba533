"""Jamba and Nemotron-H: Mamba between layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ATTENTION,
    EXPERTS,
    FEED_FORWARD,
    LAYER,
    OWN_WIDTH,
    SIGMOID,
    File,
    Gguf,
    Key,
    Made,
    Tensors,
    correction,
    ends,
    experts,
    feed_forward,
    layer,
    of_one_value,
    per_layer,
    scaled,
)


def mamba_2(block: str, layers: str = LAYER) -> Tensors:
    """Mamba-2, by a checkpoint's name of it."""
    place = f"{layers}.{block}"
    return {
        f"{place}.in_proj.weight": "blk.{n}.ssm_in.weight",
        f"{place}.conv1d.weight": Made("convolution", "blk.{n}.ssm_conv1d.weight"),
        f"{place}.conv1d.bias": "blk.{n}.ssm_conv1d.bias",
        f"{place}.dt_bias": "blk.{n}.ssm_dt.bias",
        f"{place}.A_log": Made("logarithm", "blk.{n}.ssm_a"),
        f"{place}.D": Made("flat", "blk.{n}.ssm_d"),
        f"{place}.norm.weight": Made("flat", "blk.{n}.ssm_norm.weight"),
        f"{place}.out_proj.weight": "blk.{n}.ssm_out.weight",
    }


def _every(file: File, key: str, layers: list[int], count: int) -> tuple[int, int]:
    """From which layer on, and how often, a kind of layer comes."""
    first = layers[0] if layers else count
    period = layers[1] - first if len(layers) > 1 else count
    if layers != list(range(first, count, period)):
        raise file.unsupported(key, layers)
    return first, period


def _jamba(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    count, heads = config["num_hidden_layers"], per_layer(file, "attention.head_count_kv", config)
    attend = [n for n, number in enumerate(heads) if number]
    sparse = [n for n in range(count) if file.has(f"blk.{n}.ffn_gate_inp.weight")]
    offset, period = _every(file, "attention.head_count_kv", attend, count)
    first, every = _every(file, "expert_count", sparse, count)
    return {
        "num_key_value_heads": of_one_value(file, "attention.head_count_kv", heads),
        "attn_layer_offset": offset,
        "attn_layer_period": period,
        "expert_layer_offset": first,
        "expert_layer_period": every,
        "mamba_expand": file.value(Key("ssm.inner_size")) // config["hidden_size"],
    }


def _nemotron(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = per_layer(file, "attention.head_count_kv", config)
    widths = per_layer(file, "feed_forward_length", config)
    count, inner = config["mamba_num_heads"], file.value(Key("ssm.inner_size"))
    return {
        "num_key_value_heads": of_one_value(file, "attention.head_count_kv", heads),
        "layers_block_type": [
            "full_attention"
            if number
            else "linear_attention"
            if not width
            else "moe"
            if file.has(f"blk.{n}.ffn_gate_inp.weight")
            else "mlp"
            for n, (number, width) in enumerate(zip(heads, widths, strict=True))
        ],
        "mamba_head_dim": inner // count,
        "expand": max(inner // config["hidden_size"], 1),
        "mlp_bias": any(file.has(f"blk.{n}.ffn_up.bias") for n in range(len(heads))),
        "use_conv_bias": any(file.has(f"blk.{n}.ssm_conv1d.bias") for n in range(len(heads))),
    }


_BLOCK = "backbone.layers.{n}"
_MIXER = f"{_BLOCK}.mixer"


def _in_mixer(tensors: Tensors) -> Tensors:
    """The same where attention, or a feed-forward block, is all of a layer."""
    return {f"{_MIXER}.{name.split('.', 4)[4]}": made for name, made in tensors.items()}


_STATE: dict[str, str | Key] = {
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
    "mamba_num_heads": "ssm.time_step_rank",
}
_NEMOTRON: Tensors = {
    **ends("backbone.embeddings", "backbone.norm_f"),
    f"{_BLOCK}.norm.weight": "blk.{n}.attn_norm.weight",
    **mamba_2("mixer", _BLOCK),
    **_in_mixer(ATTENTION | FEED_FORWARD),
}

ROWS = (
    Gguf(
        architecture="jamba",
        model_type="jamba",
        layered=True,
        config={
            **EXPERTS,
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        constants={"mamba_conv_bias": True, "mamba_proj_bias": False},
        fixed={"expert_weights_scale": 1.0},
        computed=(_jamba,),
        tensors={
            **ends(norm="model.final_layernorm"),
            **layer({"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"}),
            **ATTENTION,
            **feed_forward("feed_forward"),
            **experts("feed_forward", router="router"),
            **layer(
                {
                    "in_proj": "ssm_in",
                    "x_proj": "ssm_x",
                    "dt_proj": "ssm_dt",
                    "dt_layernorm": "ssm_dt_norm",
                    "b_layernorm": "ssm_b_norm",
                    "c_layernorm": "ssm_c_norm",
                    "out_proj": "ssm_out",
                },
                "mamba",
            ),
            **layer({"conv1d": "ssm_conv1d"}, "mamba", "convolution"),
            f"{LAYER}.mamba.A_log": Made("logarithms", "blk.{n}.ssm_a"),
            f"{LAYER}.mamba.D": Made("flat", "blk.{n}.ssm_d"),
        },
    ),
    Gguf(
        architecture="nemotron_h",
        model_type="nemotron_h",
        layered=True,
        eps="attention.layer_norm_epsilon",
        config=_STATE,
        computed=(_nemotron,),
        tensors=_NEMOTRON,
    ),
    Gguf(
        architecture="nemotron_h_moe",
        model_type="nemotron_h",
        layered=True,
        eps="attention.layer_norm_epsilon",
        config={
            **_STATE,
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            **OWN_WIDTH,
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "n_shared_experts": Key("expert_shared_count", 1),
            "moe_latent_size": Key("moe_latent_size", None),
            "norm_topk_prob": Key("expert_weights_norm", False),
            "n_group": Key("expert_group_count", 1),
            "topk_group": Key("expert_group_used_count", 1),
        },
        fixed={"expert_gating_func": SIGMOID},
        computed=(_nemotron, scaled),
        tensors={
            **_NEMOTRON,
            **_in_mixer(
                experts("mixer")
                | correction("mixer.gate.e_score_correction_bias")
                | layer(
                    {
                        "shared_experts.up_proj": "ffn_up_shexp",
                        "shared_experts.down_proj": "ffn_down_shexp",
                        "fc1_latent_proj": "ffn_latent_down",
                        "fc2_latent_proj": "ffn_latent_up",
                    },
                    "mixer",
                )
            ),
        },
    ),
)
