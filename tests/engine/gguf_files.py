"""Makes the GGUF files in tests/data/gguf: `python -m tests.engine.gguf_files [NAME ...]`.

For maintainers, after `python -m benchmarks.peers build`.  Tiny random models of transformers are written to GGUF
by llama.cpp's own converter; beside each file lies what llama.cpp computes with it.  Weights are of few values, so that
the files compress, and float32, so that llama.cpp computes without rounding.
"""

import json
import lzma
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType

from benchmarks import shapes
from benchmarks.peers.editions import LLAMA_CPP
from benchmarks.shapes import Published, run
from engine.bench.report import PeerError
from engine.checkpoint.gguf.file import Strings, read_gguf
from tests.tiny_gguf import dequantised, write_gguf, write_model

DATA = Path(__file__).parent.parent / "data" / "gguf"
VOCABULARY = 288
NEW_TOKENS = 64
PROMPT = [1, *(int(token) for token in np.random.RandomState(5).randint(4, VOCABULARY, 23))]


@dataclass(frozen=True)
class Case(Published):
    """A tiny model.

    Attributes:
        architecture: the file is said to be of this one instead, of which the library has no model of its own.
        keys: more metadata that it has then.
        changed: the tensors of the file -> those that it has then.
        unheard: see `write_model`, which then writes the file instead of llama.cpp's converter.
        judge: who says what is right; where llama.cpp computes something else than the model's makers, the library;
            llama.cpp alone where the library's model was another one.
    """

    architecture: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    changed: Callable[[dict[str, Any]], dict[str, Any]] = lambda tensors: tensors
    unheard: dict[str, str] = field(default_factory=dict)
    judge: str = "llama.cpp"


_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
_OWN_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
_DELTA = {
    **_EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
_LATENT = {
    **_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_GRANITE = {
    **_OWN_EXPERTS, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip

_SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48,
          "tie_word_embeddings": True}  # fmt: skip
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_FOUR = {"num_hidden_layers": 4, "sliding_window": 16,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}  # fmt: skip
_INDEXED = {"index_n_heads": 2, "index_head_dim": 128, "index_topk": 128, "n_group": 1, "topk_group": 1}
_SCALE = 1.0606601717798212
"""Of rotary embeddings for twice a length of 256 (Phi-3's formula)."""


def _of_ling_2(tensors: dict[str, Any]) -> dict[str, Any]:
    """With queries, keys and values in one matrix."""
    for name in [name for name in tensors if ".attn_q." in name]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    return {name.replace("post_attention_norm", "ffn_norm"): values for name, values in tensors.items()}


def _without_biases(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in tensors.items() if not name.endswith(".bias")}


CASES: dict[str, Case] = {
    "afmoe": Case(
        "afmoe",
        {**_SMALL, **_EXPERTS, **_FOUR, "num_dense_layers": 1, "num_shared_experts": 1, "route_scale": 1.5,
         "mup_enabled": True, "tie_word_embeddings": False},
        {"score_func": "sigmoid", "route_norm": True},
    ),
    # Ling 1 is computed as ERNIE is, without a correction of the scores; Ling 2 as GLM-4.5.
    "bailingmoe": Case(
        "ernie4_5_moe",
        {**_SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 0, "moe_layer_end_index": 1, "moe_layer_interval": 1, "tie_word_embeddings": False},
        architecture="bailingmoe",
        keys={"expert_weights_norm": True, "expert_shared_count": 2, "rope.dimension_count": 16},
        changed=lambda tensors: {name: each for name, each in tensors.items() if "exp_probs_b" not in name},
        judge="llama.cpp alone",
    ),
    "bailingmoe2": Case(
        "glm4_moe",
        {**_SMALL, **_EXPERTS, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "n_group": 4,
         "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True,
         "attention_bias": False, "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
         "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"scoring_func": "sigmoid"},
        architecture="bailingmoe2",
        changed=_of_ling_2,
    ),
    "exaone": Case("qwen2", {**_SMALL, "use_sliding_window": False}, architecture="exaone", changed=_without_biases,
                   judge="llama.cpp alone"),
    "internlm2": Case("llama", {**_SMALL, "tie_word_embeddings": False}, architecture="internlm2"),
    "arctic": Case(
        "arctic",
        {**_SMALL, **_OWN_EXPERTS, "moe_layer_frequency": 1, "parallel_attn_mlp_res": True,
         "tie_word_embeddings": False},
    ),
    "deepseek": Case(
        "deepseek",
        {**_SMALL, **_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": False,
         "tie_word_embeddings": False},
    ),
    # llama.cpp has the experts of groups compute with what the others have made, in other shares.
    "grovemoe": Case(
        "grove_moe",
        {**_SMALL, **_EXPERTS, "num_experts": 8, "num_experts_per_tok": 3, "parallel_expert_intermediate_size": 16,
         "norm_topk_prob": True, "tie_word_embeddings": False},
        {"num_local_experts": None, "head_dim": 16},
        judge="transformers",
    ),
    "smallthinker": Case(
        "smallthinker",
        {**_SMALL, "num_hidden_layers": 5, "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2,
         "moe_ffn_hidden_size": 32, "rope_layout": [0, 1, 1, 1, 0], "sliding_window_layout": [0, 1, 1, 1, 0],
         "sliding_window_size": 4096, "tie_word_embeddings": True},
    ),
    "smallthinker-4b": Case(
        "smallthinker",
        {**_SMALL, "moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2, "moe_ffn_hidden_size": 32,
         "moe_primary_router_apply_softmax": True, "tie_word_embeddings": True},
    ),
    "minicpm": Case(
        "granite",
        {**_SMALL, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
         "attention_multiplier": 0.25},
        architecture="minicpm",
    ),
    "bailingmoe3": Case(
        "bailing_hybrid",
        {**_LATENT, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48,
         "layer_group_size": 2, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "num_experts": 4,
         "num_local_experts": 4, "n_shared_experts": 1, "head_dim": 16},
        {"score_function": "sigmoid", "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise",
         "moe_shared_expert_intermediate_size": 32, "num_shared_experts": 1, "q_lora_rank": None,
         "norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512,
         "model_type": "unknown",
         "architectures": ["BailingMoeV3ForCausalLM"]},
    ),
    "cohere2": Case(
        "cohere2",
        {**_SMALL, **_FOUR, "logit_scale": 0.25},
        {"rotary_pct": 1.0},
    ),
    "command-r": Case("cohere", {**_SMALL, "logit_scale": 0.25}),
    # llama.cpp knows files with norms of queries and keys by their number of layers.
    "command-r-plus": Case("cohere", {**_SMALL, "use_qk_norm": True, "logit_scale": 0.25}, judge="transformers"),
    "cohere2moe": Case(
        "cohere2_moe",
        {**_SMALL, **_EXPERTS, **_WINDOWS, "num_shared_experts": 1, "logit_scale": 0.25, "intermediate_size": 32,
         "prefix_dense_intermediate_size": 48, "mlp_layer_types": ["dense", "sparse"],
         "expert_selection_fn": "sigmoid"},
    ),
    "dots1": Case(
        "dots1",
        {**_SMALL, **_EXPERTS, "num_key_value_heads": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
         "routed_scaling_factor": 1.5, "norm_topk_prob": True, "tie_word_embeddings": False,
         "layer_types": ["full_attention"] * 2, "sliding_window": None},
        {"scoring_func": "sigmoid"},
    ),
    "deepseek32": Case(
        "deepseek_v32",
        {**_LATENT, **_INDEXED, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 48, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        {"scoring_func": "sigmoid"},
        ("--no-mtp",),
    ),
    "deepseek4": Case(
        "deepseek_v4",
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 16,
         "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
         "num_hidden_layers": 3, "layer_types": ["sliding_attention", "compressed_sparse_attention",
                                                 "heavily_compressed_attention"],
         "mlp_layer_types": ["hash_moe", "moe", "moe"], "sliding_window": 16, "o_groups": 2, "o_lora_rank": 16,
         "index_n_heads": 2, "index_head_dim": 32, "index_topk": 64, "hc_mult": 4, "num_nextn_predict_layers": 0,
         "partial_rotary_factor": 0.5},
        {"qk_rope_head_dim": 16, "compress_ratios": [0, 4, 128], "num_hash_layers": 1,
         "scoring_func": "sqrtsoftplus", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        renamed={r"^model\.": "", "^embed_tokens": "embed", "^lm_head": "head", r"^hc_head\.hc_": "hc_head_",
                 r"attn\.norm\.": "attn.kv_norm."},
        judge="transformers",
    ),
    "qwen4exp": Case(
        "qwen4_exp_text",
        {**_DELTA, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
         "linear_num_key_heads": 1, "linear_num_value_heads": 2, "hc_count": 2, "hc_lowrank": 16,
         "layer_types": ["linear_attention", "indexed_attention"], "ple_layer_ids": [1], "ple_embed_dim": 32,
         "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 60, "split_ngram_parts": 1,
         "make_ngram_vocab_size_divisible_by": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1,
         "indexer_head_dim": 16, "indexer_budget": 128, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                             "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {"full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"],
         "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "unknown"},
    ),
    "glm-dsa": Case(
        "glm_moe_dsa",
        {**_LATENT, **_INDEXED, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 48, "norm_topk_prob": True, "num_hidden_layers": 3,
         "indexer_types": ["full", "shared", "full"]},
        {"scoring_func": "sigmoid"},
        ("--no-mtp",),
    ),
    "hy-v4": Case(
        "hy_v4",
        {**_LATENT, **_INDEXED, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 48, "norm_topk_prob": True, "mlp_layer_types": ["dense", "sparse"],
         "indexer_types": ["full", "shared"], "head_dim": 32},
        renamed={r"model\.hc_pre\.hc_head": "model.hc_head", r"hc_pre\.(hc_\w+_layer)": r"\1.hc_pre",
                 # The library writes back a feed-forward block's gate as attention's.
                 r"(mlp\.(shared_experts\.)?)linear_gate": r"\1gate_proj"},
        judge="transformers",
    ),
    "minimax-m3": Case(
        "minimax_m3_vl_text",
        {**_SMALL, **_OWN_EXPERTS, "dense_intermediate_size": 48, "shared_intermediate_size": 32, "rotary_dim": 8,
         "mlp_layer_types": ["dense", "sparse"], "layer_types": ["full_attention", "minimax_m3_sparse"],
         "index_n_heads": 1, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 64,
         "index_local_blocks": 1, "tie_word_embeddings": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"scoring_func": "sigmoid", "n_shared_experts": 1, "moe_layer_freq": [0, 1],
         "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "unknown",
         "sparse_attention_config": {"sparse_num_index_heads": 1, "sparse_index_dim": 16, "sparse_topk_blocks": 64,
                                     "sparse_block_size": 4, "sparse_local_block": 1}},
        renamed={r"layers\.1\.mlp\.gate\.e_": "layers.1.block_sparse_moe.e_",
                 r"layers\.1\.mlp": "layers.1.block_sparse_moe", r"self_attn\.indexer\.(.)_": r"self_attn.index_\1_"},
        split=True,
    ),
    # llama.cpp takes every eighth layer for one of attention, unless a file says otherwise.
    "minimax-01": Case(
        "minimax",
        {**_SMALL, **_OWN_EXPERTS, "num_hidden_layers": 4, "intermediate_size": 32, "rotary_dim": 8,
         "layer_types": (["linear_attention"] * 3 + ["full_attention"]), "full_attn_alpha_factor": 3.5,
         "linear_attn_alpha_factor": 3.5, "mlp_alpha_factor": 3.5, "tie_word_embeddings": False,
         "rms_norm_eps": 1e-6},
        {"architectures": ["MiniMaxText01ForCausalLM"], "model_type": "unknown",
         **{f"layernorm_{whose}_alpha": 3.5 for whose in ("full_attention", "linear_attention", "mlp")},
         **{f"layernorm_{whose}_beta": 1.0 for whose in ("full_attention", "linear_attention", "mlp")}},
        architecture="minimax-01",
        keys={"full_attention_interval": 4},
    ),
    "step35": Case(
        "step3p5",
        {**_SMALL, **_EXPERTS, "num_hidden_layers": 3, "sliding_window": 16, "share_expert_dim": 32,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "mlp_layer_types": ["dense", "sparse", "sparse"], "num_sliding_attention_heads": 4,
         "moe_router_scaling_factor": 2.0, "swiglu_limits": [0.0, 0.0, 0.25], "swiglu_limits_shared": [0.0, 0.25, 0.0],
         "tie_word_embeddings": False, "rope_theta": [10000.0, 1000.0, 10000.0],
         "partial_rotary_factors": [0.5, 1.0, 0.5],
         "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                          "original_max_position_embeddings": 1024}},
        {"architectures": ["Step3p5ForCausalLM"], "model_type": "unknown", "moe_layers_enum": "1,2",
         "moe_num_experts": 4, "moe_top_k": 2, "num_attention_groups": 1, "norm_expert_weight": True,
         "moe_router_activation": "sigmoid", "partial_rotary_factors": [0.5, 1.0, 0.5],
         "rope_theta": [10000.0, 1000.0, 10000.0], "attention_other_setting": {"num_attention_heads": 4,
                                                                              "num_attention_groups": 1},
         "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 2.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 32.0, "original_max_position_embeddings": 1024}},
    ),
    "dots3note": Case(
        "dots3_note_text",
        {**_LATENT, **_INDEXED, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 48, "head_dim": 32, "layer_types": ["indexed_attention", "sliding_attention"],
         "mlp_layer_types": ["dense", "sparse"], "sliding_window": 16, "shared_experts_intermediate_size": 32,
         "routed_scaling_factor": 1.5, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
         "swa_q_lora_rank": 32, "swa_kv_lora_rank": 16, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16,
         "swa_v_head_dim": 16, "swa_qk_rope_head_dim": 16, "swa_rope_theta": 1000.0, "rope_theta": 10000.0},
        {"architectures": ["Dots3NoteForCausalLM"], "model_type": "unknown", "scoring_func": "sigmoid",
         "layer_types": ["full_attention", "sliding_attention"], "first_k_dense_replace": 1, "sliding_window_size": 16,
         "apply_mla_qkv_lora_rescale": True, "swa_num_attention_heads": 4, "swa_kv_lora_rank": 16,
         "swa_q_lora_rank": 32, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_qk_rope_head_dim": 16,
         "swa_v_head_dim": 16, "moe_shared_expert_intermediate_size": 32},
    ),
    "glm5-next": Case(
        "glm5_next_text",
        {**_LATENT, **_INDEXED, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 48, "qk_rope_head_dim": 0, "num_hidden_layers": 3, "index_kpool": 4, "hc_mult": 4,
         "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
         "mlp_layer_types": ["dense", "sparse", "sparse"], "linear_head_dim": 16, "linear_num_heads": 2,
         "indexer_types": ["full", "full", "shared"], "swiglu_limit": 0.5, "routed_scaling_factor": 1.5,
         "norm_topk_prob": True, "hc_sinkhorn_iters": 4},
        {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "unknown", "scoring_func": "sigmoid",
         "mla_use_nope": True, "first_k_dense_replace": 1,
         "layer_types": ["linear_attention", "full_attention", "full_attention"],
         "linear_attn_config": {"head_dim": 16, "num_heads": 2, "short_conv_kernel_size": 4,
                                "gate_lower_bound": -5.0}},
        ("--no-mtp",),
    ),
    "ernie4-5": Case("ernie4_5", {**_SMALL, "use_bias": False}),
    "exaone-moe": Case(
        "exaone_moe",
        {**_SMALL, **_EXPERTS, **_WINDOWS, "first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse"],
         "num_shared_experts": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "tie_word_embeddings": False},
        {"scoring_func": "sigmoid"},
    ),
    "exaone4": Case("exaone4", _SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    # llama.cpp has windows in models of 64 layers only.
    "exaone4-32b": Case(
        "exaone4",
        {**_SMALL, "sliding_window": 16, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
         "num_hidden_layers": 8},
        judge="transformers",
    ),
    "gemma": Case("gemma", _SMALL),
    "gemma2": Case("gemma2", {**_SMALL, **_WINDOWS, "query_pre_attn_scalar": 16}),
    # llama.cpp fixes the width of an embedding for a layer, the rank of laurels, and which layers are sparse. Its
    # deviation from the mean is that of a sample, which differs where rows are as short as here.
    "gemma3n": Case(
        "gemma3n_text",
        {**_SMALL, "num_hidden_layers": 2, **_WINDOWS, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
         "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95, 0.95], "altup_num_inputs": 4,
         "intermediate_size": [48, 48], "vocab_size_per_layer_input": VOCABULARY},
        judge="transformers",
    ),
    "glm4": Case(
        "glm4",
        {**_SMALL, "attention_bias": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "granite": Case(
        "granite",
        {**_SMALL, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
         "attention_multiplier": 0.2},
    ),
    "granite-swa": Case(
        "granite_swa",
        {**_SMALL, **_WINDOWS, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
         "attention_multiplier": 0.2},
    ),
    "granite-swa-moe": Case(
        "granitemoe_swa",
        {**_SMALL, **_OWN_EXPERTS, **_WINDOWS, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
         "residual_multiplier": 0.5, "attention_multiplier": 0.2, "shared_intermediate_size": 48},
        renamed={r"block_sparse_moe\.router": "block_sparse_moe.router.layer",
                 r"block_sparse_moe\.experts\.gate_up_proj": "block_sparse_moe.input_linear.weight",
                 r"block_sparse_moe\.experts\.down_proj": "block_sparse_moe.output_linear.weight"},
    ),
    "hunyuan-dense": Case("hunyuan_v1_dense", _SMALL),
    "hy-v3": Case(
        "hy_v3",
        {**_SMALL, **_EXPERTS, "num_shared_experts": 1, "router_scaling_factor": 1.5, "tie_word_embeddings": False,
         "mlp_layer_types": ["dense", "sparse"]},
    ),
    "jamba": Case(
        "jamba",
        {**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4, "attn_layer_period": 2,
         "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
         "mamba_dt_rank": 4},
    ),
    "kimi-linear": Case(
        "kimi_linear",
        {**_SMALL, **_LATENT, "hidden_size": 32, "num_key_value_heads": 2, "q_lora_rank": None,
         "mlp_layer_types": ["dense", "sparse"], "layer_types": ["linear_attention", "full_attention"],
         "linear_head_dim": 16, "linear_num_heads": 2, "tie_word_embeddings": False, "n_shared_experts": 1},
        {"scoring_func": "sigmoid", "num_shared_experts": 1, "first_k_dense_replace": 1,
         "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 16, "num_heads": 2,
                                "short_conv_kernel_size": 4}},
        # The library writes back a dense block as if it had experts.
        renamed={r"layers\.0\.block_sparse_moe\.": "layers.0.mlp."},
    ),
    # Nothing at hand converts or reads these.
    "k2-horizon": Case(
        "k2_horizon",
        {**_SMALL, **_EXPERTS, "mlp_only_layers": [0], "layernorm_num_groups": 4, "norm_topk_prob": True,
         "num_shared_experts": 1, "moe_gate_bias": True, "router_score_func": "sigmoid", "router_scaling_factor": 2.5,
         "attention_gate_func": "softplus", "mova_num_experts": 6, "mova_num_experts_per_tok": 3,
         "tie_word_embeddings": False},
        architecture="k2-horizon",
        keys={"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1,
              "expert_shared_feed_forward_length": 32, "leading_dense_block_count": 1, "moe_every_n_layers": 1,
              "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_gating_func": 2,
              "attention.group_norm_groups": 4, "attention.value_expert_count": 6,
              "attention.value_expert_used_count": 3, "rope.dimension_count": 16},
        unheard={"mlp.gate.bias": "exp_probs_b.bias", "self_attn.gate_proj.weight": "attn_gate.weight",
                 "self_attn.v_router.weight": "attn_v_gate.weight", "self_attn.v_router.bias": "attn_v_gate.bias",
                 "self_attn.v_experts.weight": "attn_v_exps.weight"},
        judge="transformers",
    ),
    "k2-horizon-7b": Case(
        "k2_horizon",
        {**_SMALL, "num_experts": 0, "layernorm_num_groups": 4, "attention_gate_func": None, "query_key_norm": True,
         "tie_word_embeddings": True},
        architecture="k2-horizon",
        keys={"attention.group_norm_groups": 4},
        unheard={"": ""},
        judge="transformers",
    ),
    "laguna": Case(
        "laguna",
        {**_SMALL, **_EXPERTS, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
         "sliding_window": 16, "num_attention_heads_per_layer": [2, 4], "mlp_layer_types": ["dense", "sparse"],
         "shared_expert_intermediate_size": 32, "moe_routed_scaling_factor": 1.5, "gating": "per-head",
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0}}},
    ),
    "mellum": Case(
        "mellum",
        {**_SMALL, **_EXPERTS, **_WINDOWS, "mlp_layer_types": ["sparse"] * 2, "tie_word_embeddings": False,
         "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "mimo2": Case(
        "mimo_v2_flash",
        {**_SMALL, **_EXPERTS, "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 16,
         "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
         "v_head_dim": 8, "attention_value_scale": 0.707, "tie_word_embeddings": False,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}}},
        {"scoring_func": "sigmoid", "swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_v_head_dim": 8,
         "swa_num_key_value_heads": 2, "topk_method": "noaux_tc", "hybrid_layer_pattern": [0, 1],
         "layernorm_epsilon": 1e-5,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                             "sliding_attention": {"rope_theta": 1000.0}}},
        ("--no-mtp",),
    ),
    "mistral4": Case(
        "mistral4",
        {**_LATENT, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48,
         "norm_topk_prob": True, "head_dim": 32,
         "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        {"architectures": ["Mistral3ForConditionalGeneration"]},
    ),
    "nemotron-h": Case(
        "nemotron_h",
        {**_SMALL, "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "mlp", "full_attention"],
         "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "tie_word_embeddings": False,
         "chunk_size": 16},
        # Else the library's configuration has experts, too.
        {"num_experts_per_tok": None, "n_routed_experts": None, "n_group": None, "topk_group": None, "num_heads": 4,
         "model_type": "unknown",
         "layers_block_type": None, "hybrid_override_pattern": "M-*", "num_hidden_layers": 3},
    ),
    "nemotron-h-moe": Case(
        "nemotron_h",
        {**_SMALL, **_EXPERTS, "num_hidden_layers": 3, "tie_word_embeddings": False,
         "layers_block_type": ["linear_attention", "moe", "full_attention"],
         "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
         "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 1.5, "chunk_size": 16},
        {"num_heads": 4},
    ),
    "lfm2": Case(
        "lfm2", {**_SMALL, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {"block_ffn_dim_multiplier": 1.0},
    ),
    "mistral3": Case(
        "ministral3",
        {**_SMALL, "rope_parameters": {**_YARN, "original_max_position_embeddings": 8, "mscale": 1.0,
                                       "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "olmo2": Case("olmo2", _SMALL | {"tie_word_embeddings": False}),
    "olmo3": Case("olmo3", {**_SMALL, **_WINDOWS, "tie_word_embeddings": False}),
    "seed-oss": Case("seed_oss", {**_SMALL, "attention_bias": True}),
    "deepseek2": Case("deepseek_v2", {**_LATENT, "rope_parameters": _YARN, "routed_scaling_factor": 1.5}),
    # llama.cpp knows files without a low rank of queries by their number of layers.
    "deepseek2-lite": Case(
        "deepseek_v2",
        {
            **_LATENT, "num_hidden_layers": 26, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
            "q_lora_rank": None, "intermediate_size": 32, "moe_intermediate_size": 8, "kv_lora_rank": 16,
        },
    ),
    "deepseek3": Case(
        "deepseek_v3",
        {**_LATENT, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.5, "norm_topk_prob": True,
         "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"scoring_func": "sigmoid"},
    ),
    "glm4-moe-lite": Case(
        "glm4_moe_lite",
        {**_LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "norm_topk_prob": True},
        {"scoring_func": "sigmoid"},
    ),
    "dbrx": Case(
        "dbrx",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512,
         "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
         "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 2.0}},
    ),
    "ernie4-5-moe": Case(
        "ernie4_5_moe",
        {"intermediate_size": 128, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
         "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1},
    ),
    "gemma3": Case(
        "gemma3_text",
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48,
         "num_hidden_layers": 6, "sliding_window": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    ),
    "gemma4": Case(
        "gemma4_text",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
         "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "global_head_dim": 32,
         "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
         "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0,
         "vocab_size_per_layer_input": VOCABULARY, "tie_word_embeddings": True},
    ),
    # The smallest ones: embeddings for each layer, and layers that share keys and values with earlier ones.
    "gemma4-e": Case(
        "gemma4_text",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16,
         "global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": True, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": VOCABULARY,
         "tie_word_embeddings": True},
    ),
    "glm4-moe": Case(
        "glm4_moe",
        {**_EXPERTS, "first_k_dense_replace": 1, "n_shared_experts": 1, "use_qk_norm": True, "n_group": 1,
         "topk_group": 1, "attention_bias": True, "num_nextn_predict_layers": 0, "routed_scaling_factor": 1.5,
         "norm_topk_prob": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    # Without YaRN: llama.cpp rounds the two ends of its ramp, the model's makers and the library do not.
    "gpt-oss": Case(
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
         "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    ),
    "granitemoe": Case("granitemoe", _GRANITE),
    "granitehybrid": Case(
        "granitemoehybrid",
        {**_GRANITE, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8,
         "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 16,
         "position_embedding_type": "nope"},
        {"layer_types": ["mamba", "attention"]},
    ),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": [2, 2], "moe_intermediate_size": [32, 32], "num_shared_expert": [1, 1],
         "intermediate_size": 32, "use_qk_norm": True},
    ),
    "lfm2moe": Case(
        "lfm2_moe",
        {**_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "use_expert_bias": True,
         "tie_word_embeddings": True},
    ),
    "llama4": Case(
        "llama4_text",
        {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 32,
         "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "moe_layers": [1, 3],
         "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
         "use_qk_norm": True},
    ),
    "minimax-m2": Case(
        "minimax_m2",
        {**_OWN_EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                             "partial_rotary_factor": 0.5}},
        {"scoring_func": "sigmoid", "rotary_dim": 8},
    ),
    "phi3": Case(
        "phi3",
        {
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.25] * 4,
                "long_factor": [2.0, 4.0] * 4,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    # llama.cpp has other norms and weights of experts than the model's makers: see its family.
    "phimoe": Case(
        "phimoe",
        {**_OWN_EXPERTS, "attention_bias": True, "lm_head_bias": True,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.25] * 4,
                             "long_factor": [2.0, 4.0] * 4, "short_mscale": _SCALE, "long_mscale": _SCALE,
                             "factor": 2.0, "original_max_position_embeddings": 256}},
        {"architectures": ["PhiMoEForCausalLM"]},
        judge="transformers",
    ),
    "qwen3next": Case(
        "qwen3_next",
        {**_DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        options=("--no-mtp",),
    ),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        {**_DELTA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                                       "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {"full_attention_interval": 2},
        ("--no-mtp",),
    ),
    "qwen35": Case(
        "qwen3_5_text",
        {**_SMALL, "intermediate_size": 48, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                             "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {"full_attention_interval": 2},
        ("--no-mtp",),
    ),
    **{
        architecture: Case(
            model_type,
            {**_SMALL, **_EXPERTS, "use_sliding_window": False, "norm_topk_prob": True, "tie_word_embeddings": False},
            architecture=architecture,
            keys={"rope.dimension_sections": [3, 3, 2, 0]},
        )
        for architecture, model_type in {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe"}.items()
    },
    "smollm": Case("llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1,
                             "tie_word_embeddings": True}),
    "smollm3": Case("smollm3", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1,
                                "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
}  # fmt: skip

_REFERENCE = """
import json, numpy as np
from llama_cpp import Llama
model = Llama(FILE, n_ctx=512, n_batch=512, n_threads=1, logits_all=True, type_k=0, type_v=0, n_gpu_layers=0,
              verbose=False)
model.eval(PROMPT)
rows = np.array(model.scores[: len(PROMPT)])
tokens = []
for place in range(len(PROMPT), len(PROMPT) + NEW):
    tokens.append(int(np.argmax(model.scores[place - 1])))
    model.eval(tokens[-1:])
found = np.array(model.scores[len(PROMPT) - 1 : len(PROMPT) - 1 + NEW])
np.savez(FOLDER + "/reference.npz", rows=rows, tokens=tokens, found=found)
"""


def main(names: list[str]) -> None:
    """Makes these files, or all."""
    DATA.mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            _make(name, CASES[name], Path(folder))


def _make(name: str, case: Case, folder: Path) -> None:
    model = _build(name, case, folder)
    file = folder / "model.gguf"
    convert(case, folder, file)
    theirs = _theirs(model)
    try:
        peer = _peers(file, folder)
        theirs = peer if case.judge == "llama.cpp alone" else theirs
    except PeerError:
        if case.judge.startswith("llama.cpp"):
            raise
        peer = theirs
    away = float(np.abs(peer["rows"] - theirs["rows"]).max() / np.abs(theirs["rows"]).max())
    same = int((peer["tokens"] == theirs["tokens"]).sum())
    kept = peer if case.judge.startswith("llama.cpp") else theirs
    content = {"judge": case.judge, **_described(kept)}
    (DATA / f"{name}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    (DATA / f"{name}.gguf.xz").write_bytes(lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    size = (DATA / f"{name}.gguf.xz").stat().st_size
    report = f"{name:15} {size:7,} bytes; llama.cpp and transformers: {away:.1e} apart, {same}/{NEW_TOKENS} tokens"
    sys.stdout.write(f"{report}, least margin {min(content['margins']):.4f}\n")
    sys.stdout.flush()


def as_llama_cpp_computes(file: Path, folder: Path) -> dict[str, Any]:
    """The prompt, llama.cpp's greedy tokens after it with their margins, and rows of its logits.

    Args:
        folder: for what it writes meanwhile.
    """
    return _described(_peers(file, folder))


def _peers(file: Path, folder: Path) -> dict[str, Any]:
    run(str(LLAMA_CPP.python()), _REFERENCE, FOLDER=str(folder), FILE=str(file), PROMPT=PROMPT, NEW=NEW_TOKENS)
    with np.load(folder / "reference.npz") as read:
        return {key: read[key] for key in ("rows", "tokens", "found")}


def _described(found: dict[str, Any]) -> dict[str, Any]:
    ends = np.sort(found["found"])[:, -2:].astype(float)
    return {
        "prompt": PROMPT,
        "tokens": found["tokens"].tolist(),
        "margins": np.round(ends[:, 1] - ends[:, 0], 5).tolist(),
        "rows": {place: np.round(found["rows"][place].astype(float), 5).tolist() for place in (3, len(PROMPT) - 1)},
    }


def _build(name: str, case: Case, folder: Path) -> Any:
    """Writes the checkpoint to `folder`; the library's model of it."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from engine.runtime.own import make_known
    from tests.engine.tiny_families import model_class

    make_known(case.model_type)
    shared = {key: _BASE[key] for key in _BASE if case.model_type != "dbrx" or "token" in key or key == "vocab_size"}
    config = CONFIG_MAPPING[case.model_type](**{**shared, **case.config})
    torch.manual_seed(sum(map(ord, name)))
    model = model_class(config)(config).float().eval()
    levels = torch.tensor([-1.5, -0.5, 0.5, 1.5])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            pick = levels[torch.randint(0, 4, parameter.shape)]
            if parameter.dim() > 1:
                parameter.copy_((pick * (1.6 / parameter.shape[-1] ** 0.5)).half().float())
            elif "A_log" in key:
                parameter.copy_(torch.randint(0, 4, parameter.shape) * 0.25)
            elif "norm" in key and not key.endswith("bias"):
                parameter.copy_(parameter + pick * 0.125)
            else:
                parameter.copy_(pick * 0.25 + (1.0 if "scale" in key or "layer_scalar" in key else 0.0))
        for key, buffer in model.named_buffers():
            if "correction" in key or "expert_bias" in key:
                buffer.copy_(levels[torch.randint(0, 4, buffer.shape)] * 0.1)
            elif "layer_scalar" in key:
                buffer.fill_(0.75)
            elif "tid2eid" in key:
                buffer.copy_(torch.rand(*buffer.shape[:1], 4).argsort(-1)[:, : buffer.shape[1]])
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def convert(case: Case, folder: Path, file: Path) -> None:
    """Has llama.cpp's converter write a checkpoint to `file`."""
    if case.unheard:
        write_model(folder, file, case.architecture, unheard=case.unheard, **case.keys)
        return
    shapes.convert(case, folder, file)
    if not case.architecture:
        return
    read = read_gguf(file)
    tensors = case.changed({name: dequantised(entry) for name, entry in read.tensors.items()})

    def keys(writer: Any) -> None:
        more = {f"{read.architecture}.{key}": value for key, value in case.keys.items()}
        for key, value in {**read.metadata, **more}.items():
            plain = list(value) if isinstance(value, Strings) else getattr(value, "tolist", lambda value=value: value)()
            if key != "general.architecture":
                own = re.sub(rf"^{read.architecture}\.", f"{case.architecture}.", key)
                kind = GGUFValueType.UINT32 if type(plain) is int else GGUFValueType.get_type(plain)
                writer.add_key_value(own, plain, kind)

    write_gguf(file, tensors, architecture=case.architecture, keys=keys)


def _theirs(model: Any) -> dict[str, Any]:
    import torch

    ids, found = list(PROMPT), []
    with torch.no_grad():
        rows = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        for _ in range(NEW_TOKENS):
            found.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].numpy())
            ids.append(int(found[-1].argmax()))
    return {"rows": rows, "tokens": np.array(ids[len(PROMPT) :]), "found": np.array(found)}


def save_tokenizer(folder: Path) -> None:
    """Bytes, and a few words of two letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = {token: at for at, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    words = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou"
    for word in words.split():
        if len(vocabulary) < VOCABULARY:
            vocabulary[word] = len(vocabulary)
            merges.append((word[0], word[1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
