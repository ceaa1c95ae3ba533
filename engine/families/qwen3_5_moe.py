"""Qwen3.5-MoE and Qwen3.6-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import BESIDE_THE_LAYERS, Family
from engine.families.gguf import LAYER, File, Gguf, Key, Made, routing
from engine.families.gguf.delta import CONFIG, TENSORS, delta
from engine.families.replies import HERMES


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    sections = file.value(Key("rope.dimension_sections"))
    if not isinstance(sections, list) or len(sections) < 3:
        raise file.unsupported("rope.dimension_sections", sections)
    # Of text alone, the three sections have the same positions.
    rope = {**config["rope_parameters"], "mrope_section": sections[:3], "mrope_interleaved": True}
    return {**delta(file, config), "rope_parameters": rope}


FAMILY = Family(
    replies=HERMES,
    draft_head=BESIDE_THE_LAYERS,
    gguf=Gguf(
        architecture="qwen35moe",
        partial_rotary=True,
        config=CONFIG,
        fixed=routing(norm=True),
        computed=_computed,
        tensors={
            **TENSORS,
            f"{LAYER}.linear_attn.in_proj_qkv.weight": Made("delta_qkv", "blk.{n}.attn_qkv.weight"),
            f"{LAYER}.linear_attn.in_proj_z.weight": Made("delta_rows", "blk.{n}.attn_gate.weight"),
            f"{LAYER}.linear_attn.in_proj_a.weight": Made("delta_heads", "blk.{n}.ssm_alpha.weight"),
            f"{LAYER}.linear_attn.in_proj_b.weight": Made("delta_heads", "blk.{n}.ssm_beta.weight"),
            f"{LAYER}.linear_attn.conv1d.weight": Made("delta_convolution", "blk.{n}.ssm_conv1d.weight"),
            f"{LAYER}.linear_attn.dt_bias": Made("delta_numbers", "blk.{n}.ssm_dt.bias"),
            f"{LAYER}.linear_attn.A_log": Made("delta_logarithm", "blk.{n}.ssm_a"),
            f"{LAYER}.linear_attn.out_proj.weight": Made("delta_columns", "blk.{n}.ssm_out.weight"),
        },
    ),
)
