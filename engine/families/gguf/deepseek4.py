"""DeepSeek-V4: keys and values of many tokens in one, several streams of hidden states, and experts told by tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.families.gguf import OWN_WIDTH, File, Gguf, Key, Made, Tensors, per_layer, scaled

_SQUARE_ROOT_OF_SOFTPLUS = 4
_KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _layers(file: File, config: Mapping[str, Any]) -> dict[str, Any]:
    ratios = per_layer(file, "attention.compress_ratios", config)
    strange = [ratio for ratio in ratios if ratio not in _KINDS]
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
        "layer_types": [_KINDS[ratio] for ratio in ratios],
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in range(layers)],
        "compress_rates": {kind: ratio for ratio, kind in _KINDS.items() if ratio},
        "partial_rotary_factor": rotated,
        "rope_theta": main["rope_theta"],
        "compress_rope_theta": compress["rope_theta"],
        "rope_parameters": {
            "main": main | {"partial_rotary_factor": rotated},
            "compress": compress | {"partial_rotary_factor": rotated},
        },
    }


_NAMES = {
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
_TENSORS: Tensors = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    **{f"hc_head_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
    **{f"layers.{{n}}.{theirs}": f"blk.{{n}}.{ours}" for theirs, ours in _NAMES.items()},
    "layers.{n}.ffn.gate.tid2eid": Made("table", "blk.{n}.ffn_gate_tid2eid.weight"),
    "layers.{n}.attn.wo_a.weight": Made("below", "blk.{n}.attn_output_a.weight"),
}

ROWS = (
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
        computed=(scaled, _layers),
        tensors=_TENSORS,
    ),
)
