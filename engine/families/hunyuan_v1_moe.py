"""HunYuan."""

from __future__ import annotations

from engine.families.family import Family, Router, fast_path

FAMILY = Family(
    packs_rows=True,
    fast_path=fast_path(
        "HunYuanMoEV1",
        head_norms=("query_layernorm", "key_layernorm"),
        head_norms_last=True,
        block="Moe",
        router=Router(weight="wg.weight", normalise=True, bf16_shares=True),
    ),
)
