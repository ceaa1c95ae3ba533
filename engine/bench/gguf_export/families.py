"""Families in llama.cpp's terms: architecture, hyperparameters and tensor names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter

from engine.checkpoint.headers import TensorEntry
from engine.common.errors import EngineError, ErrorCode


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the GGUF file.

    Attributes:
        name: its name in the file.
        shape: its shape, outermost dimension first.
        sources: the checkpoint's tensors; several are stacked along a new first dimension.
        is_matrix: whether it is quantised; norms and routers stay float32, as llama.cpp requires.
        rotary_heads: how many heads' rows are reordered (see `quantisation.encoded`); 0 for none.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[TensorEntry, ...]
    is_matrix: bool
    rotary_heads: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """How a transformers `model_type` is written.

    Attributes:
        architecture: llama.cpp's name.
        reorders_rotary: whether the architecture rotates adjacent pairs, so that q and k are reordered.
        block: the checkpoint's name of the sparse block ("" for a dense feed-forward network).
        experts: the checkpoint's names of gate, up and down.
        expert_width: key of `config.json` with the width of an expert.
        renormalises: whether llama.cpp's graph normalises the selected experts' weights.
    """

    architecture: str
    reorders_rotary: bool
    block: str
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    expert_width: str = "intermediate_size"
    renormalises: bool = True


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", True, ""),
    "mixtral": Family("llama", True, "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": Family("qwen3moe", False, "mlp", expert_width="moe_intermediate_size"),
    "olmoe": Family("olmoe", False, "mlp", renormalises=False),
}

_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a `config.json`.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if it is unsupported here, or has a part that llama.cpp ignores.
    """
    kind = config["model_type"]
    family = FAMILIES.get(kind)
    if family is None:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED, f"Models of type {kind} are not written to GGUF: {', '.join(FAMILIES)} are."
        )
    rope = config.get("rope_parameters") or {}
    sum_to_one = config.get("norm_topk_prob", family.renormalises)
    differs = {
        "rope_type": rope.get("rope_type", "default") != "default" or bool(config.get("rope_scaling")),
        "sliding_window": bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", True)),
        "clip_qkv": config.get("clip_qkv") is not None,
        "mlp_only_layers": bool(config.get("mlp_only_layers")) or config.get("decoder_sparse_step", 1) != 1,
        "norm_topk_prob": sum_to_one != family.renormalises,
        "hidden_act": config.get("hidden_act", "silu") != "silu",
    }
    for key, off in differs.items():
        if off:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED, f"This model's {key} is not written to GGUF, so llama.cpp cannot run it."
            )
    return family


def add_hyperparameters(writer: GGUFWriter, family: Family, config: Mapping[str, Any]) -> None:
    """Writes the architecture's keys, and a vocabulary of bare ids: the benches use ids only."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope_theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta", 10000.0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if family.block:
        writer.add_expert_count(expert_count(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config[family.expert_width])


def expert_count(config: Mapping[str, Any]) -> int:
    """Routed experts of a layer."""
    count: int = config.get("num_local_experts") or config["num_experts"]
    return count


def gguf_tensors(
    family: Family, config: Mapping[str, Any], checkpoint: Mapping[str, TensorEntry]
) -> Iterator[GgufTensor]:
    """Every tensor of the file, in its order.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if the checkpoint has an unsupported tensor, or lacks one.
    """
    left = dict(checkpoint)

    def take(name: str) -> TensorEntry:
        try:
            return left.pop(name)
        except KeyError as error:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED, f"The checkpoint has no {name}, so it cannot be written to GGUF."
            ) from error

    def single(name: str, source: str, *, is_matrix: bool, rotary_heads: int = 0) -> GgufTensor:
        entry = take(f"{source}.weight")
        return GgufTensor(f"{name}.weight", entry.shape, (entry,), is_matrix, rotary_heads)

    yield single("token_embd", "model.embed_tokens", is_matrix=True)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        for source, name in _NORMS.items():
            if f"{theirs}{source}.weight" in left:
                yield single(ours + name, theirs + source, is_matrix=False)
        for source, name in _ATTENTION.items():
            reordered = (heads.get(source) or 0) if family.reorders_rotary else 0
            yield single(ours + name, f"{theirs}self_attn.{source}", is_matrix=True, rotary_heads=reordered)
        if not family.block:
            for source, name in zip(family.experts, _FEED_FORWARD, strict=True):
                yield single(ours + name, f"{theirs}mlp.{source}", is_matrix=True)
            continue
        block = theirs + family.block
        yield single(f"{ours}ffn_gate_inp", f"{block}.gate", is_matrix=False)
        for source, name in zip(family.experts, _FEED_FORWARD, strict=True):
            stack = tuple(take(f"{block}.experts.{expert}.{source}.weight") for expert in range(expert_count(config)))
            yield GgufTensor(f"{ours}{name}_exps.weight", (len(stack), *stack[0].shape), stack, True)
    yield single("output_norm", "model.norm", is_matrix=False)
    if "lm_head.weight" in left and config.get("tie_word_embeddings", False):
        del left["lm_head.weight"]
    if "lm_head.weight" in left:
        yield single("output", "lm_head", is_matrix=True)
    if left:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{min(left)} has no place in a GGUF file of this family: llama.cpp cannot run it.",
        )
