"""What a KV cache takes of memory: by its tensors, and for a token of context as measured when a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.narrow import NarrowLayer

_OURS = (GrowingLayer, GrowingWindowLayer, NarrowLayer)

_BUFFERED_TOKENS = 128
"""Layers that compress what lies behind keep the tokens of a group beside until it is full: DeepSeek-V4's longest."""


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes of a model's cache: `fixed`, and `per_token` of context.

    What is fixed is the state of recurrent layers, and what is kept of tokens that are still to be compressed.
    """

    per_token: int = 0
    fixed: int = 0


def measure_kv(model: Any, device: torch.device) -> KvCost:
    """What the model's own cache takes for one token of context, and by how much it grows with the second.

    Measured rather than derived, so that latent attention, shared KV and layers without any come out right.
    """
    token = torch.tensor([[_harmless_token(model)]], device=device)
    inputs: dict[str, Any] = {"input_ids": token, "use_cache": True}
    if model.config.is_encoder_decoder:  # some encoders refuse to be asked for a cache: theirs runs beforehand
        source = model.get_encoder()(input_ids=token, return_dict=True)
        inputs = {"encoder_outputs": source, "decoder_input_ids": token, "use_cache": True}
    elif (own := library_cache(model)) is not None:
        inputs["cache"] = own
    first = model(**inputs)
    cache = getattr(first, "cache", None)
    if cache is None:
        return KvCost()
    kept, all_kept = _kept_bytes(cache), cache_bytes(_of_decoder(cache))
    grown = model(**{**inputs, "cache": cache}).cache
    per_token = max(0, _kept_bytes(grown) - kept)
    growth = max(per_token, cache_bytes(_of_decoder(grown)) - all_kept)
    return KvCost(per_token, max(0, all_kept - growth) + _BUFFERED_TOKENS * (growth - per_token))


def _harmless_token(model: Any) -> int:
    text = model.config.get_text_config()
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(text, name, None)
        if isinstance(value, int) and 0 <= value < text.vocab_size:
            return value
    return 0


def _of_decoder(cache: Any) -> Any:
    """What is kept of the encoder does not grow with the answer."""
    return getattr(cache, "self_attention_cache", cache)


def _kept_bytes(cache: Any) -> int:
    """Bytes of keys, values and states, without what a layer keeps beside them for a while."""
    total = 0
    for layer in getattr(_of_decoder(cache), "layers", ()):
        tensors = {id(value): value for value in vars(layer).values() if isinstance(value, torch.Tensor)}
        total += sum(tensor.nbytes for tensor in tensors.values())
    return total


def cache_bytes(cache: Cache | None) -> int:
    """Bytes held by every tensor of a cache, whatever its layers call them.  May be asked while a forward runs."""
    if cache is None:
        return 0
    beside = _tensor_bytes([value for name, value in list(vars(cache).items()) if name != "layers"])
    return sum(cache_layer_bytes(cache)) + beside


def cache_layer_bytes(cache: Cache | None) -> list[int]:
    """Bytes held by each layer of a cache."""
    return [
        layer.allocated_bytes() if isinstance(layer, _OURS) else _tensor_bytes(vars(layer))
        for layer in list(getattr(cache, "layers", ()))
    ]


def _tensor_bytes(holder: Any) -> int:
    if isinstance(holder, torch.Tensor):
        return holder.numel() * holder.element_size()
    if isinstance(holder, dict):
        return sum(_tensor_bytes(value) for value in list(holder.values()))
    if isinstance(holder, list | tuple):
        return sum(_tensor_bytes(value) for value in list(holder))
    return 0
