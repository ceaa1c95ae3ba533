"""What a KV cache takes of memory: by its tensors, and for a token of context as measured when a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.common.footprint import PAGE_TOKENS, window_pages
from engine.kernels.native.paged_attention import KvType
from engine.runtime.kv.layers import StateLayer, library_cache
from engine.runtime.kv.paged_cache import PagedCaches, compresses, may_hold
from engine.runtime.kv.pages import PageSizes


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes of a model's cache: `fixed`, and `per_token` of context.

    What is fixed is the state of recurrent layers, and the window behind which layers compress.
    """

    per_token: int = 0
    fixed: int = 0


def measure_kv(model: Any, device: torch.device) -> tuple[KvCost, Any]:
    """What the model's own cache takes for one token of context, and by how much it grows with the second; and that
    cache, which pages are made like.

    Measured rather than derived, so that latent attention, shared KV and layers without any come out right.  A model
    whose layers come from disk is read for each forward: there is a second one only for layers of unknown kinds.
    """
    token = torch.tensor([[_harmless_token(model)]], device=device)
    inputs: dict[str, Any] = {"input_ids": token, "use_cache": True}
    if model.config.is_encoder_decoder:  # some encoders refuse to be asked for a cache: theirs runs beforehand
        source = model.get_encoder()(input_ids=token, return_dict=True)
        inputs = {"encoder_outputs": source, "decoder_input_ids": token, "use_cache": True}
    elif (own := library_cache(model)) is not None:
        inputs["cache"] = own
    cache = getattr(model(**inputs), "cache", None)
    if cache is None:
        return KvCost(), None
    if any(map(compresses, getattr(cache, "layers", ()))):
        return _in_pages(cache), cache
    kept = cache_bytes(_of_decoder(cache))
    if may_hold(cache):
        of_tokens = [part for each in cache.layers if type(each) is not StateLayer for part in _tensors(vars(each))]
        per_token = sum(part.nbytes for part in of_tokens if part.dim() > 1)  # others say what a layer's window is
        return KvCost(per_token, kept - per_token), cache
    per_token = max(0, cache_bytes(_of_decoder(model(**{**inputs, "cache": cache}).cache)) - kept)
    return KvCost(per_token, max(0, kept - per_token)), cache


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
