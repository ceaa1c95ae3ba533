"""Model families that are nothing out of the ordinary: a row each, by the transformers package with their classes.

A family that needs nothing at all has no row, one that needs more than a row has a file.
"""

from __future__ import annotations

from engine.families.family import (
    GROUPED_SIGMOID,
    READS_PICTURES,
    ClampedGate,
    DraftHead,
    Family,
    KvNumbers,
    Router,
    fast_path,
)
from engine.families.replies import DEEPSEEK, GEMMA, GRANITE, HERMES, LFM, MISTRAL

_TWO_HALVES_CLAMPED = ClampedGate("halves", "swiglu_limit")

TABLE: dict[str, Family] = {
    "afmoe": Family(packs_rows=True),
    "aria": Family(types=("aria_text",), packs_rows=True),
    "axk1": Family(packs_rows=True),
    "beam": Family(packs_rows=True),
    "cohere2_moe": Family(packs_rows=True),
    "deepseek_ocr2": Family(refused=READS_PICTURES),
    "deepseek_v32": Family(replies=DEEPSEEK),
    "deepseek_v4": Family(replies=DEEPSEEK, gate=ClampedGate("halves", "limit"), kv=KvNumbers(keys_are_values=True)),
    "diffusion_gemma": Family(
        refused="fills in whole blocks of text at a time, and Switchyard runs models that write token by token"
    ),
    # Its experts mix the routing of all tokens of a forward.
    "doge": Family(exact_tokens=lambda config: 0 if config.get("is_moe") else None),
    "dots1": Family(packs_rows=True, fast_path=fast_path("Dots1", "MoE", GROUPED_SIGMOID)),
    "ernie4_5_vl_moe": Family(types=("ernie4_5_vl_moe_text",), packs_rows=True),
    "exaone_moe": Family(packs_rows=True),
    "flex_olmo": Family(packs_rows=True),
    "flint": Family(packs_rows=True),
    "gemma3n": Family(types=("gemma3n_text",), replies=GEMMA),
    "gemma4_assistant": Family(refused="only drafts tokens for a Gemma 4 model: open that model instead"),
    # DeepSeek-V3's attention and experts under names of its own.
    "glm4_moe_lite": Family(
        replies=HERMES,
        packs_rows=True,
        fast_path=fast_path("Glm4MoeLite", "MoE", GROUPED_SIGMOID, is_latent=True),
        draft_head=DraftHead(),
    ),
    "glm4v_moe": Family(types=("glm4v_moe_text",), replies=HERMES, packs_rows=True),
    "glm5_next": Family(gate=_TWO_HALVES_CLAMPED),
    "granite": Family(replies=GRANITE),
    "granite_swa": Family(replies=GRANITE),
    "granitemoe_swa": Family(replies=GRANITE, packs_rows=True),
    "hy_v3": Family(packs_rows=True),
    "hy_v4": Family(gate=_TWO_HALVES_CLAMPED),
    "jamba": Family(continues=False),
    "jetmoe": Family(adapter="jetmoe", packs_rows=True),
    "kolibri1": Family(packs_rows=True),
    "laguna": Family(packs_rows=True),
    "lfm2": Family(replies=LFM),
    "longcat_flash": Family(adapter="longcat_flash", kv=KvNumbers(attentions=2)),
    # Its layers differ in their angles.
    "mellum": Family(
        packs_rows=True,
        fast_path=fast_path("Mellum", "SparseMoeBlock", Router(normalise="norm_topk_prob", bf16_shares=True), model=""),
    ),
    # Layers with a window have twice the key-value heads of others.
    "mimo_v2_flash": Family(packs_rows=True, kv=KvNumbers(window_heads=2)),
    "minimax": Family(continues=False),
    "minimax_m3_vl": Family(gate=ClampedGate("halves", "swiglu_limit", "swiglu_alpha")),
    "ministral": Family(replies=MISTRAL, packs_rows=True, fast_path=fast_path("Ministral"), mlx_experts={}),
    "ministral3": Family(replies=MISTRAL),
    "mistral": Family(
        with_layer_types="ministral", replies=MISTRAL, packs_rows=True, fast_path=fast_path("Mistral"), mlx_experts={}
    ),
    "mistral4": Family(replies=MISTRAL, packs_rows=True),
    "muse_spark": Family(types=("muse_spark_text",), packs_rows=True),
    "nemotron3_5_transcribe": Family(
        types=("nemo_speechlm",), refused="writes down speech, and Switchyard gives models text only"
    ),
    "nllb_moe": Family(types=("nllb-moe",), adapter="nllb_moe", experts_per_token=2),
    "openai_privacy_filter": Family(refused="marks personal data in text, and Switchyard runs models that write text"),
    "phi4_multimodal": Family(rotates_again=True),
    "qwen3_5": Family(types=("qwen3_5_text",), replies=HERMES),
    "qwen3_omni_moe": Family(replies=HERMES, adapter="qwen3_omni_moe"),
    "qwen3_vl_moe": Family(
        types=("qwen3_vl_moe_text",),
        replies=HERMES,
        packs_rows=True,
        fast_path=fast_path("Qwen3VLMoeText", "SparseMoeBlock", Router(normalise=True, bf16_shares=True), model=""),
    ),
    "qwen4_exp": Family(types=("qwen4_exp_text",), replies=HERMES),
    "solar_open": Family(packs_rows=True, fast_path=fast_path("SolarOpen", "MoE", GROUPED_SIGMOID)),
    "step3p7": Family(types=("step3p7", "step3p5"), adapter="step3p7", packs_rows=True),
    "switch_transformers": Family(adapter="switch_transformers", experts_per_token=1),
    "unlimited_ocr": Family(refused=READS_PICTURES),
}
