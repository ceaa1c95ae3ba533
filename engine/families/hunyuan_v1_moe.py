"""HunYuan."""

from __future__ import annotations

from engine.families.family import Family, Router, fast_path
from engine.families.gguf import ENDS, NORMS, Gguf, attention, experts, routing, shared_expert

FAMILY = Family(
    packs_rows=True,
    fast_path=fast_path(
        "HunYuanMoEV1",
        head_norms=("query_layernorm", "key_layernorm"),
        head_norms_last=True,
        block="Moe",
        router=Router(weight="wg.weight", normalise=True, bf16_shares=True),
    ),
    gguf=Gguf(
        architecture="hunyuan-moe",
        config={"num_experts": "expert_count", "moe_topk": "expert_used_count"},
        fixed=routing(norm=True),
        tensors={
            **ENDS,
            **NORMS,
            **attention("query_layernorm", "key_layernorm"),
            **experts(router="gate.wg"),
            **shared_expert("mlp.shared_mlp"),
        },
    ),
)
