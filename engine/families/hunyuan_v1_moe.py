"""HunYuan."""

from __future__ import annotations

from engine.families.family import Family
from engine.families.gguf import ENDS, NORMS, Gguf, attention, experts, routing, shared_expert

FAMILY = Family(
    packs_rows=True,
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
