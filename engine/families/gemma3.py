"""Gemma 3, dense, without what reads pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import Family, fast_path
from engine.families.gguf import ATTENTION, ENDS, FEED_FORWARD, LAYER, File, Gguf, Key, Made, by_layer
from engine.families.replies import GEMMA

_LARGEST = 62
"""Layers of the 27B model, the only one whose queries are not scaled by the width of a head."""


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ("sliding_attention", "full_attention")
    window = file.value(Key("attention.sliding_window", 0))
    layers = by_layer(file, "attention.sliding_window_pattern", config, kinds, 6 if window else 1)
    heads, width = config["num_attention_heads"], config["head_dim"]
    return {
        "layer_types": layers,
        "sliding_window": window or config["max_position_embeddings"],
        "query_pre_attn_scalar": config["hidden_size"] // heads if len(layers) == _LARGEST else width,
        "rope_parameters": {
            "full_attention": file.rope(),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.value(Key("rope.freq_base_swa", 10_000.0)),
            },
        },
    }


def _norm(theirs: str, ours: str) -> dict[str, Made]:
    return {f"{theirs}.weight": Made("lowered", f"{ours}.weight")}


FAMILY = Family(
    replies=GEMMA,
    fast_path=fast_path(
        "Gemma3",
        angles_by_type=True,
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        after_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        norm_offset=1.0,
        unless=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    ),
    gguf=Gguf(
        architecture="gemma3",
        own_rope=True,
        config={"final_logit_softcapping": Key("final_logit_softcapping", None)},
        constants={"hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None},
        computed=_computed,
        tensors={
            **ENDS,
            **ATTENTION,
            **FEED_FORWARD,
            **_norm("model.norm", "output_norm"),
            **_norm(f"{LAYER}.input_layernorm", "blk.{n}.attn_norm"),
            **_norm(f"{LAYER}.post_attention_layernorm", "blk.{n}.post_attention_norm"),
            **_norm(f"{LAYER}.pre_feedforward_layernorm", "blk.{n}.ffn_norm"),
            **_norm(f"{LAYER}.post_feedforward_layernorm", "blk.{n}.post_ffw_norm"),
            **_norm(f"{LAYER}.self_attn.q_norm", "blk.{n}.attn_q_norm"),
            **_norm(f"{LAYER}.self_attn.k_norm", "blk.{n}.attn_k_norm"),
        },
    ),
)
