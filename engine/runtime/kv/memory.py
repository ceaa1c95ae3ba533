"""What a KV cache takes of memory: by its tensors, and for a token of context as measured when a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.common.footprint import PAGE_TOKENS, window_pages
from engine.kernels.native.paged_attention import KvType
from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.narrow import NarrowLayer
from engine.runtime.kv.paged_cache import PagedCaches, compresses
from engine.runtime.kv.pages import PageSizes

_OURS = (GrowingLayer, GrowingWindowLayer, NarrowLayer)


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes of a model's cache: `fixed`, and `per_token` of context.

    What is fixed is the state of recurrent layers, and the window behind which layers compress.
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
    if any(map(compresses, getattr(cache, "layers", ()))):
        return _in_pages(cache)
    kept = cache_bytes(_of_decoder(cache))
    grown = model(**{**inputs, "cache": cache}).cache
    per_token = max(0, cache_bytes(_of_decoder(grown)) - kept)
    return KvCost(per_token, max(0, kept - per_token))


def _in_pages(cache: Any) -> KvCost:
    """What pages take, of a cache that has read a token; the library's own takes no more of a long context."""
    kv_type = next(each for each in KvType if each.dtype == cache.layers[0].keys.dtype)
    pages = PagedCaches.like(cache, kv_type, 1, 0, 1)
    assert pages is not None
    sizes = PageSizes.of(pages.bytes_by_window(), slides=True)
    windows = sizes.window * window_pages(sizes.window_tokens)
    return KvCost(-(-sizes.page * sizes.unit // PAGE_TOKENS), windows * sizes.unit)


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
