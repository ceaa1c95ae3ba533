"""DeepSeek-V2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import Family, FastPath, Router
from engine.families.gguf import SOFTMAX, File, Gguf
from engine.families.gguf.deepseek import CONFIG, TENSORS, gating, latent
from engine.families.replies import DEEPSEEK


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    grouped = config["n_group"] > 1
    return {**latent(file, config), "topk_method": "group_limited_greedy" if grouped else "greedy"}


FAMILY = Family(
    replies=DEEPSEEK,
    packs_rows=True,
    fast_path=FastPath(
        model="DeepseekV2ForCausalLM",
        layer="DeepseekV2DecoderLayer",
        attention="DeepseekV2Attention",
        is_latent=True,
        angles="complex",
        block="DeepseekV2Moe",
        router=Router(
            groups=("num_group", "topk_group"),
            groups_if=("topk_method", "group_limited_greedy"),
            bf16_logits=False,
            scale="routed_scaling_factor",
        ),
    ),
    gguf=Gguf(
        architecture="deepseek2",
        when=lambda metadata: gating(metadata) == SOFTMAX,
        head_dim="rope.dimension_count",
        layered=True,
        config=CONFIG,
        constants={"norm_topk_prob": False},
        # The library's code for this family normalises no weights.
        fixed={"expert_weights_norm": False},
        computed=_computed,
        tensors=TENSORS,
    ),
)
