"""Model families, by the package of transformers, or the module of ours, with their classes.

A family without special needs is listed nowhere: the library and the configuration say how to run it. Of the others
each has a row in `TABLE`, and those that are read from GGUF files one in `gguf`.
"""

from __future__ import annotations

from typing import Any, Literal

from engine.families.family import (
    BESIDE_THE_LAYERS,
    FILLS_IN,
    GROUPED_SIGMOID,
    ClampedGate,
    DraftHead,
    Family,
    FastPath,
    KvNumbers,
    Router,
    fast_path,
)
from engine.families.replies import (
    COHERE,
    COMMON,
    DEEPSEEK,
    GEMMA,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MINIMAX,
    MINIMAX_M1,
    MINIMAX_M3,
    MISTRAL,
    QWEN2,
)

_TWO_HALVES_CLAMPED = ClampedGate("halves", "swiglu_limit")
_GRANITE: dict[str, Any] = {
    "block": "MoE",
    # A softmax over the chosen logits, as gpt-oss'.
    "router": Router(normalise=True, bf16_shares=True),
    "mlp": "block_sparse_moe",
    "shared": "shared_mlp",
    "mlp_parts": ("input_linear", "output_linear"),
    "mlp_activation": "activation",
    "has_multiples": True,
}
_LFM: dict[str, Any] = {
    "mlp": "feed_forward",
    "mlp_parts": ("w1", "w3", "w2"),
    "mlp_activation": "",
    "norms": ("operator_norm", "ffn_norm"),
    "last_norm": "embedding_norm",
    "head_norms": ("q_layernorm", "k_layernorm"),
    "output": "out_proj",
}

TABLE: dict[str, Family] = {
    "afmoe": Family(packs_rows=True),
    # Snowflake Arctic.
    "arctic": Family(own=True, packs_rows=True),
    "aria": Family(types=("aria_text",), packs_rows=True),
    "axk1": Family(packs_rows=True),
    "beam": Family(packs_rows=True),
    "cohere2": Family(replies=COHERE),
    "cohere2_moe": Family(replies=COHERE, packs_rows=True),
    "dbrx": Family(adapter="dbrx.DbrxAdapter", packs_rows=True),
    # DeepSeek-MoE, the first of all.
    "deepseek": Family(
        own=True,
        packs_rows=True,
        fast_path=fast_path("Deepseek", "MoE", Router(normalise="norm_topk_prob", bf16_shares=True)),
    ),
    "deepseek_ocr2": Family(types=("deepseek_ocr2", "deepseek_ocr2_text"), packs_rows=True),
    "deepseek_v2": Family(
        replies=DEEPSEEK,
        packs_rows=True,
        fast_path=fast_path(
            "DeepseekV2",
            "Moe",
            Router(
                groups=("num_group", "topk_group"),
                groups_if=("topk_method", "group_limited_greedy"),
                bf16_logits=False,
                scale="routed_scaling_factor",
            ),
            is_latent=True,
            angles="complex",
        ),
    ),
    "deepseek_v3": Family(
        replies=DEEPSEEK,
        packs_rows=True,
        fast_path=fast_path("DeepseekV3", "MoE", GROUPED_SIGMOID, is_latent=True),
        draft_head=DraftHead(),
    ),
    "deepseek_v32": Family(
        replies=DEEPSEEK, fast_path=fast_path("DeepseekV32", "MoE", GROUPED_SIGMOID, is_latent=True, indexes="halves")
    ),
    "deepseek_v4": Family(
        replies=DEEPSEEK,
        gate=ClampedGate("halves", "limit"),
        kv=KvNumbers(keys_are_values=True),
        fast_path=fast_path(
            "DeepseekV4",
            "SparseMoeBlock",
            Router(
                scoring="sqrtsoftplus",
                table="tid2eid",
                correction="e_score_correction_bias",
                normalise=True,
                scale="routed_scaling_factor",
            ),
            compresses=True,
            angles="once",
            angles_by_type=True,
            streams=("attn_hc", "ffn_hc", "hc_head"),
        ),
    ),
    "diffusion_gemma": Family(refused=FILLS_IN),
    # Its experts mix the routing of all tokens of a forward.
    "doge": Family(takes_turns=True, exact_tokens=lambda config: 0 if config.get("is_moe") else None),
    "dots1": Family(packs_rows=True, fast_path=fast_path("Dots1", "MoE", GROUPED_SIGMOID)),
    "ernie4_5_moe": Family(
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
    ),
    "ernie4_5_vl_moe": Family(types=("ernie4_5_vl_moe_text",), packs_rows=True),
    "exaone_moe": Family(
        packs_rows=True,
        fast_path=fast_path(
            "ExaoneMoe",
            "SparseMoEBlock",
            GROUPED_SIGMOID,
            rotates=lambda attention: attention.sliding_window is None or attention.is_sliding,
        ),
    ),
    "flex_olmo": Family(packs_rows=True),
    "flint": Family(packs_rows=True),
    # Gemma 3, dense, without what reads pictures.
    "gemma3": Family(
        types=("gemma3_text",),
        replies=GEMMA,
        fast_path=fast_path(
            "Gemma3",
            angles_by_type=True,
            norms=("input_layernorm", "pre_feedforward_layernorm"),
            after_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            norm_offset=1.0,
            unless=("attn_logit_softcapping", "use_bidirectional_attention"),
        ),
    ),
    "gemma3n": Family(types=("gemma3n_text",), replies=GEMMA),
    # Gemma 4, without what reads pictures and sound.
    "gemma4": Family(
        types=("gemma4_text",),
        replies=GEMMA,
        fast_path=fast_path(
            "Gemma4Text",
            "DecoderLayer",
            Router(weight="proj.weight", normalise=True),
            model="Gemma4ForCausalLM",
            angles_by_type=True,
            norms=("input_layernorm", "pre_feedforward_layernorm"),
            after_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            experts_beside=True,
            # The small ones have embeddings for each layer, and layers that read what others keep.
            unless=("hidden_size_per_layer_input", "num_kv_shared_layers"),
        ),
    ),
    "gemma4_assistant": Family(refused="only drafts tokens for a Gemma 4 model: open that model instead"),
    "glm4_moe": Family(
        replies=HERMES,
        packs_rows=True,
        fast_path=fast_path("Glm4Moe", "MoE", GROUPED_SIGMOID),
        draft_head=DraftHead(),
        mlx_experts={},
    ),
    # DeepSeek-V3's attention and experts under names of its own.
    "glm4_moe_lite": Family(
        replies=HERMES,
        packs_rows=True,
        fast_path=fast_path("Glm4MoeLite", "MoE", GROUPED_SIGMOID, is_latent=True),
        draft_head=DraftHead(),
    ),
    "glm4v_moe": Family(types=("glm4v_moe_text",), replies=HERMES, packs_rows=True),
    "glm5_next": Family(replies=HERMES, gate=_TWO_HALVES_CLAMPED),
    "glm5_next_text": Family(own=True, replies=HERMES),
    # GLM-5: some layers attend to what the one before them has chosen.
    "glm_moe_dsa": Family(
        replies=HERMES,
        fast_path=fast_path(
            "GlmMoeDsa", "MoE", GROUPED_SIGMOID, is_latent=True, indexes="neighbours", passes_choice=True
        ),
    ),
    # gpt-oss: sinks (a logit per head of attending to nothing), norms that round once, and a gate of its own.
    # A softmax over the chosen logits is one over all of them, made to sum to 1.
    "gpt_oss": Family(
        replies=HARMONY,
        packs_rows=True,
        fast_path=fast_path("GptOss", "MLP", Router(bias="bias", normalise=True, bf16_shares=True), angles="once"),
        gate=ClampedGate("alternating", "limit", "alpha"),
    ),
    "granite": Family(replies=GRANITE, fast_path=fast_path("Granite", has_multiples=True)),
    "granite_swa": Family(replies=GRANITE, fast_path=fast_path("GraniteSWA", has_multiples=True)),
    "granitemoe": Family(replies=GRANITE, packs_rows=True, fast_path=fast_path("GraniteMoe", **_GRANITE)),
    "granitemoe_swa": Family(replies=GRANITE, packs_rows=True, fast_path=fast_path("GraniteMoeSWA", **_GRANITE)),
    # Granite 4.0: Mamba-2 and attention, with experts or dense; most rotate nothing.
    "granitemoehybrid": Family(
        replies=GRANITE,
        fast_path=fast_path(
            "GraniteMoeHybrid",
            **_GRANITE,
            delta="GraniteMoeHybridMambaLayer",
            rotates=lambda attention: attention.config.position_embedding_type == "rope",
        ),
    ),
    # Granite, MoE with shared experts.
    "granitemoeshared": Family(replies=GRANITE, packs_rows=True, fast_path=fast_path("GraniteMoeShared", **_GRANITE)),
    "grove_moe": Family(own=True, packs_rows=True),
    "hunyuan_v1_moe": Family(
        packs_rows=True,
        fast_path=fast_path(
            "HunYuanMoEV1",
            head_norms=("query_layernorm", "key_layernorm"),
            head_norms_last=True,
            block="Moe",
            router=Router(weight="wg.weight", normalise=True, bf16_shares=True),
        ),
    ),
    "hy_v3": Family(
        packs_rows=True,
        fast_path=fast_path(
            "HYV3",
            "MoE",
            Router(
                scoring="sigmoid",
                correction="e_score_correction_bias",
                bf16_logits=False,
                normalise=True,
                scale="router_scaling_factor",
            ),
        ),
    ),
    "hy_v4": Family(gate=_TWO_HALVES_CLAMPED),
    # Between its layers the model hands on more than hidden states.
    "inkling2": Family(types=("inkling2", "inkling2_text"), takes_turns=True),
    "inkling2_loop": Family(types=("inkling2_loop", "inkling2_loop_text"), takes_turns=True),
    "jamba": Family(adapter="jamba.JambaAdapter"),
    "jetmoe": Family(adapter="jetmoe.JetMoeAdapter", packs_rows=True),
    # K2 Horizon: dense, with experts, or with experts of attention's values, too.
    "k2_horizon": Family(own=True, packs_rows=True),
    "kimi_k25": Family(replies=KIMI),
    # Latent attention that rotates nothing, and Kimi Delta Attention.
    "kimi_linear": Family(
        replies=KIMI,
        fast_path=fast_path(
            "KimiLinear",
            "MoE",
            GROUPED_SIGMOID,
            is_latent=True,
            angles="none",
            delta="KimiLinearDeltaAttention",
        ),
    ),
    "kolibri1": Family(packs_rows=True),
    "laguna": Family(packs_rows=True),
    # Short convolutions and attention.
    "lfm2": Family(replies=LFM, fast_path=fast_path("Lfm2", **_LFM, delta="Lfm2ShortConv")),
    "lfm2_moe": Family(
        replies=LFM,
        fast_path=fast_path(
            "Lfm2Moe",
            "SparseMoeBlock",
            Router(
                scoring="sigmoid",
                correction="expert_bias",
                normalise="norm_topk_prob",
                bf16_shares=True,
                scale="routed_scaling_factor",
            ),
            **_LFM,
            delta="Lfm2MoeShortConv",
        ),
    ),
    # Also LLaDA-MoE.
    "llada": Family(types=("llada", "lladamoe"), own=True, refused=FILLS_IN),
    "llama": Family(replies=LLAMA, packs_rows=True, fast_path=fast_path("Llama"), mlx_experts={}),
    # Llama 4, with or without what reads pictures.
    "llama4": Family(types=("llama4", "llama4_text"), replies=LLAMA, adapter="llama4.Llama4Adapter"),
    "longcat_flash": Family(adapter="longcat_flash.LongcatFlashAdapter", kv=KvNumbers(attentions=2), takes_turns=True),
    "mellum": Family(
        packs_rows=True,
        fast_path=fast_path(
            "Mellum",
            "SparseMoeBlock",
            Router(normalise="norm_topk_prob", bf16_shares=True),
            angles_by_type=True,
        ),
    ),
    # Layers with a window have twice the key-value heads of others.
    "mimo_v2_flash": Family(packs_rows=True, kv=KvNumbers(window_heads=2)),
    # MiniMax-Text-01 and M1, by the library's names and by their makers'.
    "minimax": Family(types=("minimax", "minimax_text_01", "minimax_m1"), own=True, replies=MINIMAX_M1),
    "minimax_m2": Family(
        replies=MINIMAX,
        packs_rows=True,
        fast_path=fast_path(
            "MiniMaxM2",
            norms_all_heads=True,
            block="SparseMoeBlock",
            router=Router(scoring="sigmoid", correction="e_score_correction_bias", normalise=True),
        ),
        mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    ),
    "minimax_m3_vl": Family(
        types=("minimax_m3_vl", "minimax_m3_vl_text"),
        replies=MINIMAX_M3,
        gate=ClampedGate("halves", "swiglu_limit", "swiglu_alpha"),
        fast_path=fast_path(
            "MiniMaxM3VL",
            "SparseMoeBlock",
            Router(
                scoring="sigmoid",
                correction="e_score_correction_bias",
                normalise=True,
                scale="routed_scaling_factor",
            ),
            norm_offset=1.0,
            indexes="halves",
        ),
    ),
    "ministral": Family(replies=MISTRAL, packs_rows=True, fast_path=fast_path("Ministral"), mlx_experts={}),
    "ministral3": Family(replies=MISTRAL),
    "mistral": Family(
        with_layer_types="ministral", replies=MISTRAL, packs_rows=True, fast_path=fast_path("Mistral"), mlx_experts={}
    ),
    "mistral4": Family(replies=MISTRAL, packs_rows=True),
    "mistral_large4": Family(replies=MISTRAL),
    "mixtral": Family(
        replies=MISTRAL,
        packs_rows=True,
        fast_path=fast_path("Mixtral", "SparseMoeBlock", Router(normalise=True)),
        mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    ),
    "muse_spark": Family(types=("muse_spark_text",), packs_rows=True),
    "nemotron3_5_transcribe": Family(
        types=("nemo_speechlm",), refused="writes down speech, and Switchyard gives models text only"
    ),
    # Nemotron 3 Nano: Mamba 2, attention and experts, each a layer.
    "nemotron_h": Family(
        fast_path=fast_path(
            "NemotronH",
            "MoE",
            GROUPED_SIGMOID,
            layer="NemotronHBlock",
            delta="NemotronHMamba2Mixer",
            mixer="mixer",
            mlp="mixer",
            of_one_part=True,
            mlp_parts=("", "up_proj", "down_proj"),
            norms=("norm", "norm"),
            embedding="embeddings",
            last_norm="norm_f",
            angles="none",
            rotates=lambda _attention: False,
        ),
    ),
    "nllb_moe": Family(
        types=("nllb-moe",), adapter="switch_transformers.NllbMoeAdapter", experts_per_token=2, takes_turns=True
    ),
    "olmoe": Family(
        packs_rows=True,
        fast_path=fast_path(
            "Olmoe", "SparseMoeBlock", Router(normalise="norm_topk_prob", bf16_shares=True), norms_all_heads=True
        ),
        mlx_experts={},
    ),
    "openai_privacy_filter": Family(refused="marks personal data in text, and Switchyard runs models that write text"),
    "phi3": Family(rotates_again=True),
    "phi4_multimodal": Family(rotates_again=True),
    "phimoe": Family(rotates_again=True, mlx_experts={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    "qwen2": Family(replies=QWEN2, packs_rows=True, fast_path=fast_path("Qwen2"), mlx_experts={}),
    "qwen2_moe": Family(
        replies=QWEN2,
        packs_rows=True,
        fast_path=fast_path("Qwen2Moe", "SparseMoeBlock", Router(normalise="norm_topk_prob", bf16_shares=True)),
        mlx_experts={},
    ),
    "qwen3": Family(replies=HERMES, packs_rows=True, fast_path=fast_path("Qwen3"), mlx_experts={}),
    "qwen3_5": Family(
        types=("qwen3_5_text",),
        replies=HERMES,
        fast_path=fast_path("Qwen3_5", delta="Qwen3_5GatedDeltaNet", gates_heads=True, norm_offset=1.0),
    ),
    "qwen3_5_moe": Family(
        types=("qwen3_5_moe_text",),
        replies=HERMES,
        draft_head=BESIDE_THE_LAYERS,
        fast_path=fast_path(
            "Qwen3_5Moe",
            "SparseMoeBlock",
            Router(normalise=True, bf16_shares=True),
            delta="Qwen3_5MoeGatedDeltaNet",
            gates_heads=True,
            norm_offset=1.0,
        ),
    ),
    "qwen3_moe": Family(
        replies=HERMES,
        packs_rows=True,
        fast_path=fast_path("Qwen3Moe", "SparseMoeBlock", Router(normalise="norm_topk_prob", bf16_shares=True)),
        mlx_experts={},
    ),
    "qwen3_next": Family(
        replies=HERMES,
        draft_head=BESIDE_THE_LAYERS,
        fast_path=fast_path(
            "Qwen3Next",
            "SparseMoeBlock",
            Router(normalise="norm_topk_prob", bf16_shares=True),
            delta="Qwen3NextGatedDeltaNet",
            gates_heads=True,
            norm_offset=1.0,
        ),
    ),
    "qwen3_omni_moe": Family(replies=HERMES, adapter="qwen3_moe.Qwen3OmniAdapter"),
    "qwen3_vl": Family(types=("qwen3_vl_text",), replies=HERMES, fast_path=fast_path("Qwen3VLText", model="")),
    "qwen3_vl_moe": Family(
        types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
        replies=HERMES,
        adapter="qwen3_moe.Qwen3VLMoeAdapter",
        packs_rows=True,
        fast_path=fast_path("Qwen3VLMoeText", "SparseMoeBlock", Router(normalise=True, bf16_shares=True), model=""),
    ),
    "qwen4_exp": Family(types=("qwen4_exp_text",), replies=HERMES),
    "sarvam_mla": Family(replies=COMMON, packs_rows=True),
    "sarvam_moe": Family(replies=HERMES, packs_rows=True),
    "smallthinker": Family(own=True, packs_rows=True),
    "smollm3": Family(
        replies=HERMES, fast_path=fast_path("SmolLM3", rotates=lambda attention: bool(attention.use_rope))
    ),
    "solar_open": Family(packs_rows=True, fast_path=fast_path("SolarOpen", "MoE", GROUPED_SIGMOID)),
    "step3p5": Family(own=True, adapter="step3p7.Step3p7Adapter", packs_rows=True),
    "step3p7": Family(adapter="step3p7.Step3p7Adapter"),
    "switch_transformers": Family(
        adapter="switch_transformers.SwitchTransformersAdapter", experts_per_token=1, takes_turns=True
    ),
    "unlimited_ocr": Family(
        refused="forgets what it wrote but for a window, and holds on to its pictures, which Switchyard does not do"
    ),
}


PACKAGES = {model_type: package for package, row in TABLE.items() for model_type in row.types or (package,)}
"""`model_type` -> the library's package with its classes, of all families that are listed."""

_NEEDS_NOTHING = Family()


def family_of(model_type: str) -> Family:
    """The family of this transformers `model_type`; the default family if it is not listed."""
    return TABLE.get(PACKAGES.get(model_type, ""), _NEEDS_NOTHING)


def family_at(module: str) -> Family:
    """The family whose classes are in the library's module of this name (`transformers.models.llama.modeling_llama`).

    The default family if it is not listed, or the module is neither transformers' nor one of `engine.runtime.own`.
    """
    place = module.split(".")
    theirs, ours = place[:2] == ["transformers", "models"], place[:3] == ["engine", "runtime", "own"]
    name = ".".join(place[2:3] if theirs else place[3:] if ours else ())
    return TABLE.get(name, _NEEDS_NOTHING)


def fast_path_of(module: object, part: Literal["model", "layer", "attention", "delta", "block"]) -> FastPath | None:
    """The fast path of the family in which `module` is this part: an instance of exactly that library class.

    Returns:
        `None` if the class is not known.
    """
    kind = type(module)
    path = family_at(kind.__module__).fast_path
    return path if path is not None and kind.__name__ == getattr(path, part) else None
