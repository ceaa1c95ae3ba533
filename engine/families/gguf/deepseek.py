"""What DeepSeek's GGUF files share; GLM-4.7-Flash's are the same but for their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ENDS,
    FEED_FORWARD,
    LAYER,
    NORMS,
    SIGMOID,
    SOFTMAX,
    File,
    Key,
    Made,
    Tensors,
    experts,
    scale_of_weights,
    shared_expert,
)

_GLM_FLASH_TOKENS = 154_880


def gating(metadata: Mapping[str, Any]) -> int:
    """How experts are scored; older files do not say, and llama.cpp knows GLM-4.7-Flash among them by its size."""
    found = metadata.get("deepseek2.expert_gating_func")
    if found:
        return found if type(found) is int else SOFTMAX
    tokens = metadata.get("deepseek2.vocab_size")
    is_glm = metadata.get("deepseek2.block_count") in (47, 48) and tokens == _GLM_FLASH_TOKENS
    return SIGMOID if is_glm else SOFTMAX


CONFIG: dict[str, str | Key] = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": Key("leading_dense_block_count", 0),
    "q_lora_rank": Key("attention.q_lora_rank", None),
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "n_group": Key("expert_group_count", 1),
    "topk_group": Key("expert_group_used_count", 1),
}


def latent(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of heads, and YaRN, whose factor of the logits llama.cpp keeps as a tenth."""
    # Files from before llama.cpp computed in the latent space have one matrix, and the widths of whole heads.
    suffix = "" if file.value(Key("attention.key_length_mla", None)) is None else "_mla"
    whole = file.value(Key(f"attention.key_length{suffix}"))
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        scale = file.value(Key("rope.scaling.yarn_log_multiplier", None))
        if not scale:
            raise file.unsupported("rope.scaling.yarn_log_multiplier", scale)
        del rope["attention_factor"]
        rope["mscale"] = rope["mscale_all_dim"] = round(scale * 10, 6)
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": whole - config["qk_rope_head_dim"],
        "v_head_dim": file.value(Key(f"attention.value_length{suffix}")),
        "routed_scaling_factor": scale_of_weights(file),
        "rope_parameters": rope,
    }


TENSORS: Tensors = {
    **ENDS,
    **NORMS,
    **FEED_FORWARD,
    **experts(),
    **shared_expert("mlp.shared_experts"),
    f"{LAYER}.mlp.gate.e_score_correction_bias": "blk.{n}.exp_probs_b.bias",
    **{
        f"{LAYER}.self_attn.{theirs}.weight": f"blk.{{n}}.{ours}.weight"
        for theirs, ours in {
            "q_proj": "attn_q", "q_a_proj": "attn_q_a", "q_a_layernorm": "attn_q_a_norm", "q_b_proj": "attn_q_b",
            "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_a_layernorm": "attn_kv_a_norm", "o_proj": "attn_output",
        }.items()
    },
    f"{LAYER}.self_attn.kv_b_proj.weight": (
        "blk.{n}.attn_kv_b.weight",
        Made("latent_heads", "blk.{n}.attn_k_b.weight", "blk.{n}.attn_v_b.weight"),
    ),
}  # fmt: skip
