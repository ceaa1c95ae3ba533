"""ERNIE 4.5."""

from __future__ import annotations

from engine.families.family import Family, Router, fast_path

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
)
