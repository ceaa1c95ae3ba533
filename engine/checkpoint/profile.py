"""What a model is and what it will need, from its config.json and safetensors headers alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import read_config, text_part
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.shards import read_tensors

# What the families call the same thing; the first one that is a positive number counts.
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
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
_PER_TOKEN_BY_FAMILY = {"switch_transformers": 1, "nllb-moe": 2}  # what their configurations do not say
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_NESTED = ("ffn_config", "moe_config", "attn_config")  # dbrx keeps its experts and heads there

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
        parameters, expert_parameters: counted in elements, quantisation unpacked, scales not counted.
        bytes, expert_bytes: of the tensors in the files.
        context_tokens: longest context that the model was made for; 0 if the config does not say.
        kv_elements_per_token: numbers that one more token of context adds to the cache.
        dtype: as config.json says, e.g. `bfloat16`; empty if it does not.
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
    count = _number(text, _EXPERTS)
    per_token = _number(text, _PER_TOKEN) or _PER_TOKEN_BY_FAMILY.get(str(config["model_type"]), 0)
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    return ModelProfile(
        family=str(config["model_type"]),
        layers=_layers(text),
        hidden=_number(text, _HIDDEN),
        experts=count if count > 1 else 0,
        experts_per_token=per_token if count > 1 else 0,
        parameters=sum(map(parameters_of, tensors)),
        expert_parameters=sum(map(parameters_of, experts)) if count > 1 else 0,
        bytes=sum(entry.nbytes for entry in tensors),
        expert_bytes=sum(entry.nbytes for entry in experts) if count > 1 else 0,
        context_tokens=_number(text, _CONTEXT),
        kv_elements_per_token=kv_elements_per_token(text),
        dtype=str(
            text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
        ),
        quantization=str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else "",
    )


def kv_elements_per_token(text: dict[str, Any]) -> int:
    """Numbers of KV cache per token, all layers together, as transformers keeps them.

    Multi-head latent attention is cached as latents with the rotary part of the keys, and with the keys of the index of
    important tokens where there is one.  Layers of linear attention keep no growing cache; `layer_types` tells them
    apart where it is given.
    """
    heads = _number(text, ("num_attention_heads", "n_heads", "n_head", "decoder_attention_heads", "num_heads"))
    layers = _number(text, (*_DECODER_LAYERS, *_LAYERS))
    types = text.get("layer_types")
    if isinstance(types, list) and types:
        layers = sum(1 for kind in types if "attention" in str(kind) and "linear" not in str(kind)) or layers
    latent = _number(text, ("kv_lora_rank",))
    if latent:
        index = _number(text, ("index_head_dim",)) if _number(text, ("index_topk",)) else 0
        return layers * (latent + _number(text, ("qk_rope_head_dim",)) + index)
    kv_heads = _number(text, ("num_key_value_heads", "kv_n_heads")) or heads
    head = _number(text, ("head_dim", "kv_channels", "d_kv")) or (_number(text, _HIDDEN) // heads if heads else 0)
    return layers * 2 * kv_heads * head


def _layers(text: dict[str, Any]) -> int:
    """All of them, those of the encoder too."""
    if text.get("is_encoder_decoder"):
        return _number(text, ("encoder_layers", *_LAYERS)) + _number(text, _DECODER_LAYERS)
    return _number(text, _LAYERS)


def _number(config: dict[str, Any], names: Iterable[str]) -> int:
    places = [config, *(nested for key in _NESTED if isinstance(nested := config.get(key), dict))]
    for place in places:
        for name in names:
            value = place.get(name)
            if isinstance(value, list) and value:  # a number per layer
                value = max((item for item in value if isinstance(item, int)), default=0)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def is_expert_key(key: str) -> bool:
    """Whether a tensor of this name belongs to routed experts."""
    return _EXPERT_KEY.search(key) is not None and _SHARED_KEY.search(key) is None


def parameters_of(entry: TensorEntry) -> int:
    """Elements of a tensor, unpacked; none if it only holds the scales of another."""
    if _SCALE_KEY.search(entry.key):
        return 0
    packed = entry.dtype in ("U8", "I8") and entry.key.endswith("_blocks")
    return entry.numel * 2 if packed else entry.numel
