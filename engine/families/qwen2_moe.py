"""Qwen1.5-MoE and Qwen2-MoE."""

from __future__ import annotations

from engine.families.family import Family, FastPath, Router
from engine.families.gguf import ATTENTION, ENDS, NORMS, Gguf, Made, experts, routing
from engine.families.replies import QWEN2

FAMILY = Family(
    replies=QWEN2,
    packs_rows=True,
    fast_path=FastPath(
        model="Qwen2MoeForCausalLM",
        layer="Qwen2MoeDecoderLayer",
        attention="Qwen2MoeAttention",
        block="Qwen2MoeSparseMoeBlock",
        router=Router(normalise="norm_topk_prob", bf16_shares=True),
    ),
    gguf=Gguf(
        architecture="qwen2moe",
        config={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        constants={
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "qkv_bias": True,
        },
        fixed=routing(norm=False),
        tensors={
            **ENDS,
            **NORMS,
            **ATTENTION,
            **experts(),
            "model.layers.{n}.mlp.shared_expert_gate.weight": Made("row", "blk.{n}.ffn_gate_inp_shexp.weight"),
            "model.layers.{n}.mlp.shared_expert.gate_proj.weight": "blk.{n}.ffn_gate_shexp.weight",
            "model.layers.{n}.mlp.shared_expert.up_proj.weight": "blk.{n}.ffn_up_shexp.weight",
            "model.layers.{n}.mlp.shared_expert.down_proj.weight": "blk.{n}.ffn_down_shexp.weight",
        },
    ),
    mlx_experts={},
)
