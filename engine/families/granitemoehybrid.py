"""Granite 4.0: Mamba-2 and attention, with experts or dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import Family
from engine.families.gguf import LAYER, File, Gguf, Key, Made, of_one_value, per_layer
from engine.families.gguf.granite import CONFIG, FIXED, SHARED, TENSORS, multipliers
from engine.families.replies import GRANITE


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = per_layer(file, "attention.head_count_kv", config)
    inner, mamba_heads = file.value(Key("ssm.inner_size")), file.value(Key("ssm.time_step_rank"))
    dense = not config["num_local_experts"]
    return {
        **multipliers(file, config),
        "num_key_value_heads": of_one_value(file, "attention.head_count_kv", heads),
        "layer_types": ["attention" if count else "mamba" for count in heads],
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


FAMILY = Family(
    replies=GRANITE,
    gguf=Gguf(
        architecture="granitehybrid",
        layered=True,
        config={
            **CONFIG,
            "mamba_d_state": "ssm.state_size",
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_conv": "ssm.conv_kernel",
        },
        constants={"mamba_proj_bias": False, "mamba_chunk_size": 256},
        fixed=FIXED,
        computed=_computed,
        tensors={
            **TENSORS,
            **SHARED,
            f"{LAYER}.mamba.in_proj.weight": "blk.{n}.ssm_in.weight",
            f"{LAYER}.mamba.conv1d.weight": Made("convolution", "blk.{n}.ssm_conv1d.weight"),
            f"{LAYER}.mamba.conv1d.bias": "blk.{n}.ssm_conv1d.bias",
            f"{LAYER}.mamba.dt_bias": "blk.{n}.ssm_dt.bias",
            f"{LAYER}.mamba.A_log": Made("logarithm", "blk.{n}.ssm_a"),
            f"{LAYER}.mamba.D": Made("flat", "blk.{n}.ssm_d"),
            f"{LAYER}.mamba.norm.weight": Made("flat", "blk.{n}.ssm_norm.weight"),
            f"{LAYER}.mamba.out_proj.weight": "blk.{n}.ssm_out.weight",
        },
    ),
)
