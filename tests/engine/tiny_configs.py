"""The table of tiny configurations, by transformers' `model_type`.

`COMMON` holds what many families call by the same name: each takes what its configuration knows of it.  The table
says what a family needs besides, chiefly so that each of its kinds of layer occurs.
"""

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "unpadded_vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "expert_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "mlp_only_layers": [],
    "sliding_window": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
}
_LOOPED = {
    "num_hidden_layers": 4,
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
}
_LATENT = {"num_key_value_heads": 4}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    **_LINEAR,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_THREE_AXES = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    }
}
_SPARSE_SECOND = {"mlp_layer_types": ["dense", "sparse"]}
_INDEXED = {**_LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 8}
_COMPRESSED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 32,
    "index_head_dim": 8,
    "index_topk": 8,
}
_BLOCKS_CHOSEN = {
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
}
_POOLED = {
    **_INDEXED,
    "index_kpool": 2,
    "qk_rope_head_dim": 0,
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}
_STEP = {
    "num_hidden_layers": 4,
    "share_expert_dim": 24,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_sliding_attention_heads": 8,
    "swiglu_limits": [0.0, 0.0, 0.2, 0.2],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.2],
    "moe_router_scaling_factor": 2.0,
}
_INDEXED_AND_SLIDING = {
    **_INDEXED,
    "layer_types": ["indexed_attention", "sliding_attention"],
    "head_dim": 12,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 8,
    "swa_head_dim": 12,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
    "shared_experts_intermediate_size": 24,
}

DENSE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    "granite": {},
    "granite_swa": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"]},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_5_text": _DELTA,
    "smollm3": {"no_rope_layers": [1, 0], "sliding_window": None},
    "doge": {"is_moe": True, "num_experts": 16, "sliding_window": None},
}
"""Doge's experts are rows of an embedding, which stay with the rest of the model."""

MOE: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1},
    "aria_text": {},
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": {**_LATENT, **_LINEAR, **_SPARSE_SECOND, "num_mtp_layers": 0},
    "beam": _SPARSE_SECOND,
    "cohere2_moe": {},
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "n_group": 2},
    "deepseek_v32": _INDEXED,
    "deepseek_v4": _COMPRESSED,
    "dots1": {},
    "dots3_note_text": _INDEXED_AND_SLIDING,
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {},
    "gemma4_text": {
        "enable_moe_block": True,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "gpt_oss": {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {
        **_LINEAR,
        "shared_intermediate_size": 24,
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "granitemoeshared": {"shared_intermediate_size": 24},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": _INDEXED,
    "inkling_text": {},
    "inkling2_text": {},
    "inkling2_loop_text": _LOOPED,
    "lara_mini": _DELTA,
    "sarvam_mla": _LATENT,
    "sarvam_moe": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4},
    "kimi_linear": {
        **_LATENT,
        **_LINEAR,
        **_SPARSE_SECOND,
        "q_lora_rank": None,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "kolibri1": {},
    "laguna": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": _BLOCKS_CHOSEN,
    "mistral4": _LATENT,
    "mixtral": {"num_local_experts": 4},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_moe": {"num_experts_per_tok": 3},
    "qwen3_next": _DELTA,
    "qwen4_exp_text": {
        **_DELTA,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "solar_open": {},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

OWN: dict[str, dict[str, Any]] = {
    "arctic": {"moe_layer_frequency": 1, "parallel_attn_mlp_res": True},
    "deepseek": {},
    "glm5_next_text": _POOLED,
    "grove_moe": {"num_experts_per_tok": 3, "parallel_expert_intermediate_size": 8},
    "k2_horizon": {
        "mlp_only_layers": [0],
        "layernorm_num_groups": 4,
        "norm_topk_prob": True,
        "moe_gate_bias": True,
        "router_score_func": "sigmoid",
        "router_scaling_factor": 2.5,
        "attention_gate_func": "softplus",
        "mova_num_experts": 6,
        "mova_num_experts_per_tok": 3,
    },
    "minimax": {
        **_LINEAR,
        "block_size": 8,
        "rotary_dim": 4,
        "sliding_window": None,
        "linear_attn_alpha_factor": 1.5,
        "full_attn_beta_factor": 0.75,
        "mlp_alpha_factor": 1.25,
    },
    "smallthinker": {
        "rope_layout": [0, 1],
        "sliding_window_layout": [0, 1],
        "sliding_window_size": 8,
        "moe_num_primary_experts": 8,
        "moe_num_active_primary_experts": 2,
        "moe_ffn_hidden_size": 24,
    },
}
"""Families that the library lacks."""
MOE |= OWN

TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "depth": 1,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "embed_dim": 32,
    "patch_size": 4,
    "image_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "in_channels": 3,
    "spatial_merge_size": 2,
}
"""What `COMMON` is for text, for the towers of models that also see or hear."""

OMNI: dict[str, Any] = {
    "vision_start_token_id": 5,
    "text_config": {**_THREE_AXES, "num_experts_per_tok": 3, "sliding_window": None},
    "audio_config": {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "output_dim": 32,
        "downsample_hidden_size": 16,
        "num_mel_bins": 16,
    },
}

_OF_RUNS = {
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 60,
    "split_ngram_parts": 1,
    "make_ngram_vocab_size_divisible_by": 16,
}
"""Embeddings of runs of tokens."""
MULTIMODAL: dict[str, dict[str, Any]] = {
    "aria": {},
    "deepseek_ocr2": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse"],
            "num_key_value_heads": 4,
            "max_position_embeddings": 1024,
        },
        "vision_config": {
            "sam_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 256,
                "patch_size": 4,
                "downsample_channels": [16, 32],
            },
            "encoder_config": {
                "vocab_size": 8,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
        },
    },
    "dots3_note": {
        "text_config": _INDEXED_AND_SLIDING,
        "vision_config": {
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "mlp_layer_types": ["sparse"],
            "num_local_experts": 4,
            "moe_intermediate_size": 16,
        },
        "audio_config": {
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
            "feature_size": 16,
            "downsample_hidden_size": 16,
        },
    },
    "ernie4_5_vl_moe": {"text_config": {**_THREE_AXES, "moe_intermediate_size": [24, 16]}},
    "gemma4": {"text_config": MOE["gemma4_text"]},
    "glm4v_moe": {"text_config": _THREE_AXES},
    "glm5_next": {
        "text_config": _POOLED,
        "vision_config": {"projection_intermediate_size": 32},
    },
    "inkling2": {"vision_config": {"text_hidden_size": 32, "projection_hidden_dim": 32, "posemb_grid_size": 4}},
    "inkling2_loop": {
        "text_config": _LOOPED,
        "vision_config": {"text_hidden_size": 32, "projection_hidden_dim": 32, "posemb_grid_size": 4},
    },
    "inkling_mm_model": {
        "vision_config": {"patch_size": 2, "n_layers": 4},
        "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 16},
    },
    "hy_v4_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}}
    },
    "kimi_k25": {
        "text_config": _LATENT,
        "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 32,
    },
    "minimax_m3_vl": {"text_config": _BLOCKS_CHOSEN, "projector_hidden_size": 32},
    "mistral_large4": {"text_config": _LATENT},
    "muse_spark": {
        "text_config": {"moe_hidden_size": 16, "mlp_layer_types": ["dense", "sparse"]},
        "out_hidden_size": 4 * 32,
        "projector_hidden_size": 32,
        "audio_config": {"patch_sizes": [4], "hidden_sizes": [32], "depths": [1], "mlp_ratio": 1.0},
    },
    "nemotron_h_omni": {
        "text_config": MOE["nemotron_h"],
        "vision_config": {"video_temporal_patch_size": 2},
        "projector_hidden_size": 32,
        "vision_hidden_size": 32,
    },
    "qwen3_5_moe": {"text_config": _DELTA},
    "qwen3_omni_moe_thinker": OMNI,
    "qwen3_vl_moe": {},
    "qwen4_exp": {"text_config": {**MOE["qwen4_exp_text"], **_OF_RUNS}},
}
"""Values by sub-configuration; all of these get a tiny one."""

FAMILIES: dict[str, dict[str, Any]] = {**DENSE, **MOE, **MULTIMODAL}
USUAL = (
    "llama",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "gemma3_text",
    "qwen3_next",
    "minimax_m2",
)
"""Those whose layers most others share, or that most people run: tried wherever only some families are."""

_ATTENDS_EVERYWHERE = {**_THREE_AXES, "sliding_window": None}
SEEING: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": DENSE["gemma3_text"],
        "mm_tokens_per_image": 4,
    },
    "glm4v": {"text_config": _THREE_AXES},
    "glm46v": {"text_config": _THREE_AXES},
    "internvl": {"text_config": {"model_type": "qwen3_moe"}},
    "mistral3": {"text_config": {"model_type": "mistral4", **_LATENT}},
    "qwen2_5_vl": {
        "text_config": _ATTENDS_EVERYWHERE,
        "vision_config": {"window_size": 16, "fullatt_block_indexes": [0]},
    },
    "qwen2_vl": {"text_config": _ATTENDS_EVERYWHERE},
    "qwen3_5": {"text_config": _DELTA},
    "qwen3_vl": {"text_config": _THREE_AXES},
}
"""Models whose whole is tested with pictures alone."""

_SEE_AND_READ: dict[str, Any] = {
    "intermediate_size": 4 * 32,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}

ADAPTED: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3},
    },
    "llama4": {
        "text_config": {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 40},
        "vision_config": _SEE_AND_READ,
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 40,
        "attention_chunk_size": 8,
        "num_experts_per_tok": 1,
    },
    "jetmoe": {"initializer_range": 0.05, "kv_channels": 8, "num_key_value_heads": 2},
    "longcat_flash": {
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "ffn_hidden_size": 40,
        "expert_ffn_hidden_size": 24,
        "head_dim": 4,
        "qk_head_dim": 12,
        "zero_expert_num": 4,
        "moe_topk": 4,
    },
    "step3p5": _STEP,
    "step3p7": {"text_config": _STEP},
    "switch_transformers": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 24,
        "num_heads": 4,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": 12,
        "expert_capacity": 2,
        "decoder_start_token_id": 0,
    },
    "nllb-moe": {
        "init_std": 0.1,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 40,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_experts": 12,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
    },
}
"""Families that need an adapter; two of them also see, and the last two are encoder-decoders."""
