"""ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.family import Family, Router, fast_path
from engine.families.gguf import (
    ATTENTION,
    ENDS,
    FEED_FORWARD,
    LAYER,
    NORMS,
    File,
    Gguf,
    Key,
    Made,
    experts,
    routing,
    shared_expert,
)


def _computed(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = file.value(Key("expert_shared_feed_forward_length", 0))
    return {
        "moe_num_shared_experts": shared // config["moe_intermediate_size"],
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
        "use_bias": config["attention_bias"],
    }


FAMILY = Family(
    packs_rows=True,
    fast_path=fast_path(
        "Ernie4_5_Moe",
        rotates_neighbours=True,
        block="SparseMoeBlock",
        router=Router(
            correction="moe_statics.e_score_correction_bias",
            bf16_logits=False,
            normalise=True,
            least="norm_min",
            bf16_shares=True,
        ),
    ),
    gguf=Gguf(
        architecture="ernie4_5-moe",
        config={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_layer_start_index": Key("leading_dense_block_count", 0),
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        fixed=routing(norm=True),
        computed=_computed,
        tensors={
            **ENDS,
            **NORMS,
            **ATTENTION,
            **FEED_FORWARD,
            **experts(),
            **shared_expert("mlp.shared_experts"),
            f"{LAYER}.mlp.moe_statics.e_score_correction_bias": Made("row", "blk.{n}.exp_probs_b.bias"),
        },
    ),
)
