"""Gemma 3, dense, without what reads pictures."""

from __future__ import annotations

from engine.families.family import Family, fast_path
from engine.families.replies import GEMMA

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
)
