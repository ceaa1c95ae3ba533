"""Which families' layers take the tokens of many rows as one sequence."""

from __future__ import annotations

from typing import Any

PACKED: frozenset[str] = frozenset(
    {
        *("afmoe", "aria_text", "axk1", "beam", "cohere2_moe", "dbrx", "deepseek_v2", "deepseek_v3", "dots1"),
        *("ernie4_5_moe", "ernie4_5_vl_moe_text", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite"),
        *("glm4v_moe_text", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3"),
        *("jetmoe", "kolibri1", "laguna", "llama", "mellum", "mimo_v2_flash", "minimax_m2", "mistral4", "mixtral"),
        *("muse_spark_text", "olmoe", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "solar_open", "step3p5"),
    }
)
"""Their layers compute each token by itself but for attention, which goes through the library's attention interface
with nothing hidden in a mask but what a window says: a test holds each to the library's own answers.  Others keep a
state besides (Mamba, delta rules, convolutions), choose tokens by an index, attend in chunks, or pass things on from
layer to layer."""

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest row of a call."""


def can_pack(model: Any) -> bool:
    """Whether rows can go through this model's layers without padding."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    variants = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return (
        not getattr(model.config, "is_encoder_decoder", False)
        and config.model_type in PACKED
        and not any(variant.get("rope_type") in _BY_LENGTH for variant in variants)
    )
