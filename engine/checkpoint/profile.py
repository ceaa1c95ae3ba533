"""A model's properties and memory needs, from its config.json and safetensors headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import read_config, text_part
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.kv_numbers import DECODER_LAYERS, HIDDEN, LAYERS, kv_elements_per_token, number_of
from engine.checkpoint.shards import read_tensors
from engine.families import family_of

# The families' names for the same value; the first positive number counts.
_EXPERTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "n_experts",
)
_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k", "top_k",
    "experts_per_token", "num_selected_experts", "num_experts_per_topk",
)  # fmt: skip
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")

_EXPERT_KEY = re.compile(r"(\.|^)(experts|expert_mlp|input_linear|output_linear)\b|\.experts?_\d+\.")
_SHARED_KEY = re.compile(r"shared_(expert|mlp)")
_SCALE_KEY = re.compile(r"(_scale|_scale_inv|_scales|\.scale|\.qscale_weight)$")


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model as its files describe it.

    Attributes:
        family: transformers' `model_type`.
        layers, hidden: depth and width of the language model.
        experts, experts_per_token: per MoE layer; 0 for a dense model.
        parameters, expert_parameters: in elements, unpacked, without scales.
        bytes, expert_bytes: of the tensors in the files.
        context_tokens: longest supported context; 0 if unknown.
        trained_tokens: context length of the training, if the rotary embedding extends it.
        kv_elements_per_token: cache elements per token of context.
        dtype: from config.json, e.g. `bfloat16`; empty if unknown.
        quantization: `fp8`, `mxfp4`, ...; empty for plain weights.
    """

    family: str
    layers: int
    hidden: int
    experts: int
    experts_per_token: int
    parameters: int
    expert_parameters: int
    bytes: int
    expert_bytes: int
    context_tokens: int
    trained_tokens: int
    kv_elements_per_token: int
    dtype: str
    quantization: str


def read_profile(directory: Path) -> ModelProfile:
    """The profile of the checkpoint in a directory.

    Raises:
        EngineError: the checkpoint is damaged, unsafe or of an unknown format.
    """
    return profile_of(read_config(directory), read_tensors(directory).values())


def profile_of(config: dict[str, Any], tensors: Iterable[TensorEntry]) -> ModelProfile:
    """The profile of a model with this configuration and these tensors."""
    text = text_part(config)
    tensors = list(tensors)
    experts = [entry for entry in tensors if is_expert_key(entry.key)]
    count = number_of(text, _EXPERTS)
    per_token = number_of(text, _PER_TOKEN) or family_of(str(config["model_type"])).experts_per_token
    trained = number_of(text, _CONTEXT)
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    return ModelProfile(
        family=str(config["model_type"]),
        layers=_layers(text),
        hidden=number_of(text, HIDDEN),
        experts=count if count > 1 else 0,
        experts_per_token=per_token if count > 1 else 0,
        parameters=sum(map(parameters_of, tensors)),
        expert_parameters=sum(map(parameters_of, experts)) if count > 1 else 0,
        bytes=sum(entry.nbytes for entry in tensors),
        expert_bytes=sum(entry.nbytes for entry in experts) if count > 1 else 0,
        context_tokens=stretched_context(text, trained),
        trained_tokens=trained,
        kv_elements_per_token=kv_elements_per_token(text),
        dtype=str(
            text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
        ),
        quantization=str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else "",
    )


def stretched_context(text: dict[str, Any], trained: int) -> int:
    """The longest context of a model trained on `trained` tokens, as extended by its rotary embedding.

    A dynamic one (NTK) grows with the context, up to `factor` times the training length. YaRN and LongRoPE give their
    original length, and may allow more than `max_position_embeddings` (Qwen's do). `linear` and `llama3` also have a
    factor, but it is often already included in that number: nothing is added. If layer types differ, those without a
    window decide.
    """
    ropes = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(ropes, dict) or not trained:
        return trained
    by_layer = [rope for name, rope in ropes.items() if isinstance(rope, dict) and "sliding" not in name]
    own = text.get("original_max_position_embeddings")
    return min((_stretched(rope, trained, own) for rope in by_layer or [ropes]), default=trained)


def _stretched(rope: dict[str, Any], trained: int, own: object) -> int:
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        return trained
    if kind == "dynamic":
        start: object = None if rope.get("alpha") else trained  # HunYuan's has a fixed base and gives its length
    elif kind in ("yarn", "longrope"):
        start = own or rope.get("original_max_position_embeddings") or trained
    else:
        return trained
    if not isinstance(start, int) or not 0 < start <= trained:  # inconsistent
        return trained
    return max(trained, int(start * factor))


def _layers(text: dict[str, Any]) -> int:
    """Number of layers, including an encoder's."""
    if text.get("is_encoder_decoder"):
        return number_of(text, ("encoder_layers", *LAYERS)) + number_of(text, DECODER_LAYERS)
    return number_of(text, LAYERS) or len(text.get("layers_block_type") or text.get("layer_types") or ())


def is_expert_key(key: str) -> bool:
    """Whether a tensor of this name belongs to routed experts."""
    return _EXPERT_KEY.search(key) is not None and _SHARED_KEY.search(key) is None


def parameters_of(entry: TensorEntry) -> int:
    """Unpacked elements of a tensor; 0 if it only holds another tensor's scales."""
    if _SCALE_KEY.search(entry.key):
        return 0
    packed = entry.dtype in ("U8", "I8") and entry.key.endswith("_blocks")
    return entry.numel * 2 if packed else entry.numel
