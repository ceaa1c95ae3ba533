"""Which of our cache layers stands in for which of the library's."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from engine.kernels.native.paged_attention import KvType
from engine.runtime.kv.growing import GrowingIndexedLayer, GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.narrow import NarrowLayer


def new_cache(model: Any, most_tokens: int | None = None, kv_type: KvType | None = None) -> Cache | None:
    """An empty cache for this model; `None` if the model insists on making its own.

    Args:
        most_tokens: length of the context, which bounds what is allocated ahead.
        kv_type: of layers that see the whole context; `None` for the model's own.
    """
    if not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [_growing(layer, most_tokens, kv_type) for layer in cache.layers]
    return cache


def _growing(layer: Any, most_tokens: int | None, kv_type: KvType | None) -> Any:
    """A new layer that does what the library's new `layer` does, in place where that is known."""
    if type(layer) is DynamicLayer:
        return GrowingLayer(most_tokens) if kv_type is None else NarrowLayer(kv_type, most_tokens)
    if type(layer) is DynamicIndexedLayer:
        return GrowingIndexedLayer(most_tokens)
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingWindowLayer(layer.sliding_window)
    return layer
