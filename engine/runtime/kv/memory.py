"""What a KV cache takes of memory: by its tensors, and for a token of context as measured when a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.runtime.kv.layers import library_cache

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


def cache_bytes(cache: Any) -> int:
    """Bytes held by every tensor of a cache, whatever its layers call them."""
    return sum(tensor.nbytes for tensor in cache_tensors(cache))


def cache_tensors(cache: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a cache.  May be asked while a forward runs."""
    for name, value in list(vars(cache).items()) if cache is not None else []:
        if name == "layers":
            yield from _tensors([vars(layer) for layer in value])
        elif isinstance(value, Cache):
            yield from cache_tensors(value)
        else:
            yield from _tensors(value)


def _tensors(holder: Any) -> Iterator[torch.Tensor]:
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, dict | list | tuple):
        for each in list(holder.values() if isinstance(holder, dict) else holder):
            yield from _tensors(each)
