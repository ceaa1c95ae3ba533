"""Qwen3-Next."""

from __future__ import annotations

from engine.families.family import BESIDE_THE_LAYERS, Family
from engine.families.gguf import LAYER, Gguf, Made, routing
from engine.families.gguf.delta import CONFIG, TENSORS, delta
from engine.families.replies import HERMES

FAMILY = Family(
    replies=HERMES,
    draft_head=BESIDE_THE_LAYERS,
    gguf=Gguf(
        architecture="qwen3next",
        partial_rotary=True,
        config=CONFIG,
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        fixed=routing(norm=True),
        computed=delta,
        tensors={
            **TENSORS,
            f"{LAYER}.linear_attn.in_proj_qkvz.weight": (
                "blk.{n}.ssm_in.weight",  # in older files
                Made("by_key_head", "blk.{n}.attn_qkv.weight", "blk.{n}.attn_gate.weight"),
            ),
            f"{LAYER}.linear_attn.in_proj_ba.weight": "blk.{n}.ssm_ba.weight",
            f"{LAYER}.linear_attn.conv1d.weight": Made("convolution", "blk.{n}.ssm_conv1d.weight"),
            f"{LAYER}.linear_attn.dt_bias": "blk.{n}.ssm_dt.bias",
            f"{LAYER}.linear_attn.A_log": Made("logarithm", "blk.{n}.ssm_a"),
            f"{LAYER}.linear_attn.out_proj.weight": "blk.{n}.ssm_out.weight",
        },
    ),
)
