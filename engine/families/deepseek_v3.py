"""DeepSeek-V3 and R1."""

from __future__ import annotations

from engine.families.family import GROUPED_SIGMOID, DraftHead, Family, FastPath
from engine.families.gguf import SIGMOID, Gguf, Key
from engine.families.gguf.deepseek import CONFIG, TENSORS, gating, latent
from engine.families.replies import DEEPSEEK

FAMILY = Family(
    replies=DEEPSEEK,
    packs_rows=True,
    fast_path=FastPath(
        model="DeepseekV3ForCausalLM",
        layer="DeepseekV3DecoderLayer",
        attention="DeepseekV3Attention",
        is_latent=True,
        block="DeepseekV3MoE",
        router=GROUPED_SIGMOID,
    ),
    draft_head=DraftHead(),
    gguf=Gguf(
        architecture="deepseek2",
        when=lambda metadata: gating(metadata) == SIGMOID,
        head_dim="rope.dimension_count",
        layered=True,
        config={**CONFIG, "norm_topk_prob": Key("expert_weights_norm", False)},
        constants={"rope_interleave": True},
        computed=latent,
        tensors=TENSORS,
    ),
)
