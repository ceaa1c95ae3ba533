"""DeepSeek's latent attention; GLM-4.7-Flash's files are the same but for their sizes.

And DeepSeek-V4: keys and values of many tokens in one, several streams of hidden states, and experts told by tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import (
    ENDS,
    FEED_FORWARD,
    LAYER,
    NORMS,
    OWN_WIDTH,
    ROUTED_EXPERTS,
    SIGMOID,
    SOFTMAX,
    File,
    Gguf,
    Key,
    Made,
    Tensors,
    correction,
    experts,
    layer,
    of_one_value,
    per_layer,
    scaled,
    shared_expert,
    stacked_experts,
    which_are_sparse,
)

_GLM_FLASH_TOKENS = 154_880


def _gating(metadata: Mapping[str, Any]) -> int:
    """How experts are scored; older files do not say, and llama.cpp knows GLM-4.7-Flash among them by its size."""
    found = metadata.get("deepseek2.expert_gating_func")
    if found:
        return found if type(found) is int else SOFTMAX
    tokens = metadata.get("deepseek2.vocab_size")
    is_glm = metadata.get("deepseek2.block_count") in (47, 48) and tokens == _GLM_FLASH_TOKENS
    return SIGMOID if is_glm else SOFTMAX


def latent(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of heads, and YaRN, whose factor of the logits llama.cpp keeps as a tenth."""
    # Files from before llama.cpp computed in the latent space have one matrix, and the widths of whole heads.
    suffix = "" if file.value(Key("attention.key_length_mla", None)) is None else "_mla"
    whole = file.value(Key(f"attention.key_length{suffix}"))
    rope = dict(config["rope_parameters"])
    if rope["rope_type"] == "yarn":
        scale = file.value(Key("rope.scaling.yarn_log_multiplier", None))
        if not scale:
            raise file.unsupported("rope.scaling.yarn_log_multiplier", scale)
        del rope["attention_factor"]
        rope["mscale"] = rope["mscale_all_dim"] = round(scale * 10, 6)
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": whole - config["qk_rope_head_dim"],
        "v_head_dim": file.value(Key(f"attention.value_length{suffix}")),
        "rope_parameters": rope,
    }


def _grows(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """Queries that grow with the logarithm of the position, as Llama 4's do."""
    rope = dict(config["rope_parameters"])
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    rope["original_max_position_embeddings"] = file.value(Key("attention.temperature_length", original))
    rope["llama_4_scaling_beta"] = file.value(Key("attention.temperature_scale", 0.0))
    return {"rope_parameters": rope, "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}


LATENT: Tensors = {
    **layer(
        {
            "q_proj": "attn_q",
            "q_a_proj": "attn_q_a",
            "q_a_layernorm": "attn_q_a_norm",
            "q_b_proj": "attn_q_b",
            "kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "kv_a_layernorm": "attn_kv_a_norm",
            "o_proj": "attn_output",
        },
        "self_attn",
    ),
    f"{LAYER}.self_attn.kv_b_proj.weight": (
        "blk.{n}.attn_kv_b.weight",
        Made("latent_heads", "blk.{n}.attn_k_b.weight", "blk.{n}.attn_v_b.weight"),
    ),
}
"""Multi-head latent attention."""
TENSORS: Tensors = (
    ENDS
    | NORMS
    | FEED_FORWARD
    | experts()
    | shared_expert("mlp.shared_experts")
    | correction("mlp.gate.e_score_correction_bias")
    | LATENT
)


INDEXER = layer(
    {"wq_b": "indexer.attn_q_b", "wk": "indexer.attn_k", "k_norm": "indexer.k_norm", "weights_proj": "indexer.proj"},
    "self_attn.indexer",
)
"""Which tokens a layer attends to."""


def indexers(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without an indexer attend to the same tokens as the one before."""
    layers = range(config["num_hidden_layers"])
    has = [file.has(f"blk.{n}.indexer.attn_k.weight") for n in layers]
    return {"indexer_types": ["full" if each else "shared" for each in has]}


def _dots3(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a sliding window have heads, and a latent space, of their own."""
    slides = per_layer(file, "attention.sliding_window_pattern", config)
    counts = list(zip(per_layer(file, "attention.head_count", config), slides, strict=True))
    heads, of_windows = (
        of_one_value(file, "attention.head_count", [count for count, own in counts if own == kind])
        for kind in (False, True)
    )
    width, rotated = file.value(Key("attention.key_length_mla_swa")), config["qk_rope_head_dim"]
    sliding = {
        "num_attention_heads": of_windows,
        "num_key_value_heads": of_windows,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": file.value(Key("attention.kv_lora_rank_swa")),
        "head_dim": width,
        "qk_nope_head_dim": width - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": file.value(Key("attention.value_length_mla_swa")),
    }
    theta = {"rope_type": "default", "rope_theta": file.value(Key("rope.freq_base_swa"))}
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": config["qk_nope_head_dim"] + rotated,
        "layer_types": ["sliding_attention" if each else "indexed_attention" for each in slides],
        "sliding_window": file.value(Key("attention.sliding_window")),
        "shared_experts_intermediate_size": config["moe_intermediate_size"],
        "per_layer_config": {str(layer): sliding for layer, each in enumerate(slides) if each},
        "rope_parameters": {"indexed_attention": config["rope_parameters"], "sliding_attention": theta},
    }


RANKS: dict[str, str | Key] = {
    "q_lora_rank": Key("attention.q_lora_rank", None),
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
_CONFIG = ROUTED_EXPERTS | RANKS
INDEXES: dict[str, str | Key] = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}


_SQUARE_ROOT_OF_SOFTPLUS = 4
_KINDS_4 = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _deepseek4(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    ratios = per_layer(file, "attention.compress_ratios", config)
    strange = [ratio for ratio in ratios if ratio not in _KINDS_4]
    if strange:
        raise file.unsupported("attention.compress_ratios", strange)
    shared = file.value(Key("swiglu_clamp_shexp", config["swiglu_limit"]))
    if shared != config["swiglu_limit"]:
        raise file.unsupported("swiglu_clamp_shexp", shared)
    layers, hashed = config["num_hidden_layers"], file.value(Key("hash_layer_count", 0))
    rotated = file.value(Key("rope.dimension_count")) / config["head_dim"]
    main = {"rope_type": "default", "rope_theta": file.value(Key("rope.freq_base"))}
    compress = file.rope() | {"rope_theta": file.value(Key("attention.compress_rope_freq_base"))}
    if compress["rope_type"] == "yarn":
        compress["attention_factor"] = 1.0
    return {
        "layer_types": [_KINDS_4[ratio] for ratio in ratios],
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in range(layers)],
        "compress_rates": {kind: ratio for ratio, kind in _KINDS_4.items() if ratio},
        "partial_rotary_factor": rotated,
        "rope_theta": main["rope_theta"],
        "compress_rope_theta": compress["rope_theta"],
        "rope_parameters": {
            "main": main | {"partial_rotary_factor": rotated},
            "compress": compress | {"partial_rotary_factor": rotated},
        },
    }


_NAMES_4 = {
    "attn.attn_sink": "attn_sinks.weight",
    **{
        f"attn.{theirs}.weight": f"{ours}.weight"
        for theirs, ours in {
            "wq_a": "attn_q_a",
            "q_norm": "attn_q_a_norm",
            "wq_b": "attn_q_b",
            "wkv": "attn_kv",
            "kv_norm": "attn_kv_a_norm",
            "wo_b": "attn_output_b",
            "indexer.wq_b": "indexer.attn_q_b",
            "indexer.weights_proj": "indexer.proj",
        }.items()
    },
    **{
        f"attn.{indexer}compressor.{theirs}": f"{ours}_compressor_{part}.weight"
        for indexer, ours in (("", "attn"), ("indexer.", "indexer"))
        for theirs, part in {"wkv.weight": "kv", "wgate.weight": "gate", "ape": "ape", "norm.weight": "norm"}.items()
    },
    **{
        f"hc_{block}_{part}": f"hc_{block}_{part}.weight"
        for block in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    **{
        f"ffn.{theirs}.{matrix}.weight": f"ffn_{part}_{kind}.weight"
        for theirs, kind in {"experts.{e}": "exps", "shared_experts": "shexp"}.items()
        for matrix, part in {"w1": "gate", "w2": "down", "w3": "up"}.items()
    },
}
_TENSORS_4: Tensors = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    **{f"hc_head_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
    **{f"layers.{{n}}.{theirs}": f"blk.{{n}}.{ours}" for theirs, ours in _NAMES_4.items()},
    "layers.{n}.ffn.gate.tid2eid": Made("table", "blk.{n}.ffn_gate_tid2eid.weight"),
    "layers.{n}.attn.wo_a.weight": Made("below", "blk.{n}.attn_output_a.weight"),
}


ROWS = (
    # Factors of the latents are in the norms before them.
    Gguf(
        architecture="dots3note",
        model_type="dots3_note_text",
        head_dim="rope.dimension_count",
        layered=True,
        config={**_CONFIG, **INDEXES},
        fixed={"expert_gating_func": SIGMOID},
        computed=(latent, scaled, which_are_sparse, _dots3),
        tensors=TENSORS
        | INDEXER
        | layer({"g_proj": "attn_gate", "k_rope_only_layernorm": "attn_k_norm"}, "self_attn")
        | layer({"q_a_layernorm": "attn_q_a_norm", "kv_a_layernorm": "attn_kv_a_norm"}, "self_attn", "latent_norm"),
    ),
    Gguf(
        architecture="deepseek2",
        model_type="deepseek_v2",
        when=lambda metadata: _gating(metadata) == SOFTMAX,
        head_dim="rope.dimension_count",
        layered=True,
        config=_CONFIG,
        # The library's code for this family normalises no weights.
        fixed={"expert_weights_norm": False},
        computed=(
            latent,
            scaled,
            lambda _, config: {"topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"},
        ),
        tensors=TENSORS,
    ),
    Gguf(
        architecture="deepseek2",
        model_type="deepseek_v3",
        when=lambda metadata: _gating(metadata) == SIGMOID,
        head_dim="rope.dimension_count",
        layered=True,
        config=_CONFIG,
        constants={"rope_interleave": True},
        computed=(latent, scaled),
        tensors=TENSORS,
    ),
    Gguf(
        architecture="mistral4",
        model_type="mistral4",
        head_dim="rope.dimension_count",
        layered=True,
        config=_CONFIG,
        constants={"rope_interleave": True},
        fixed={"expert_gating_func": SOFTMAX},
        computed=(latent, scaled, _grows),
        tensors=ENDS
        | NORMS
        | FEED_FORWARD
        | layer({"mlp.gate": "ffn_gate_inp"})
        | stacked_experts("mlp.experts")
        | shared_expert("mlp.shared_experts")
        | LATENT,
    ),
    *(
        Gguf(
            architecture=architecture,
            model_type=model_type,
            head_dim="rope.dimension_count",
            layered=True,
            config={
                **_CONFIG,
                **INDEXES,
            },
            fixed={"expert_gating_func": SIGMOID},
            computed=(latent, scaled, which_are_sparse, *more),
            tensors=TENSORS | INDEXER,
        )
        for architecture, model_type, more in (
            ("deepseek32", "deepseek_v32", ()),
            ("glm-dsa", "glm_moe_dsa", (indexers,)),
        )
    ),
    Gguf(
        architecture="hy_v4",
        model_type="hy_v4",
        head_dim="rope.dimension_count",
        layered=True,
        config={
            **_CONFIG,
            **INDEXES,
            "swiglu_limit": Key("swiglu_clamp_exp", 0.0),
            "hc_mult": "hyper_connection.count",
            "hc_eps": "hyper_connection.epsilon",
            "hc_magnitude": "hyper_connection.magnitude",
        },
        fixed={"expert_gating_func": SIGMOID},
        computed=(latent, scaled, which_are_sparse, indexers),
        tensors={
            **ENDS,
            **NORMS,
            **FEED_FORWARD,
            **layer({"mlp.gate": "ffn_gate_inp", "self_attn.gate_proj": "attn_gate"}),
            **stacked_experts("mlp.experts"),
            **shared_expert("mlp.shared_experts"),
            **correction("mlp.gate.e_score_correction_bias"),
            **LATENT,
            **INDEXER,
            f"{LAYER}.self_attn.sinks": "blk.{n}.attn_sinks.weight",
            **{
                f"{LAYER}.{block}_hc.{part}": f"blk.{{n}}.hc_{block}_{part}.weight"
                for block in ("attn", "ffn")
                for part in ("fn", "base", "scale")
            },
            **{f"model.hc_head.hc_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
        },
    ),
    Gguf(
        architecture="deepseek4",
        model_type="deepseek_v4",
        own_rope=True,
        config={
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            **OWN_WIDTH,
            "n_shared_experts": "expert_shared_count",
            "norm_topk_prob": "expert_weights_norm",
            "q_lora_rank": "attention.q_lora_rank",
            "o_groups": "attention.output_group_count",
            "o_lora_rank": "attention.output_lora_rank",
            "sliding_window": "attention.sliding_window",
            "swiglu_limit": "swiglu_clamp_exp",
            "index_n_heads": "attention.indexer.head_count",
            "index_head_dim": "attention.indexer.key_length",
            "index_topk": "attention.indexer.top_k",
            "hc_mult": "hyper_connection.count",
            "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
            "hc_eps": "hyper_connection.epsilon",
        },
        constants={"scoring_func": "sqrtsoftplus", "num_nextn_predict_layers": 0},
        fixed={"expert_gating_func": _SQUARE_ROOT_OF_SOFTPLUS},
        computed=(scaled, _deepseek4),
        tensors=_TENSORS_4,
    ),
)
