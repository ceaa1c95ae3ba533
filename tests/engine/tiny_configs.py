"""The table of tiny configurations, by transformers' `model_type`."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "intermediate_size": 64},
    "qwen3": {**_BASE, "intermediate_size": 64},
    "mixtral": {**_BASE, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_BASE,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [],
    },
    "gpt_oss": {
        **_BASE,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        **{key: value for key, value in _BASE.items() if key != "head_dim"},
        **_MLA,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "olmoe": {**_BASE, "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2},
}
