"""What may be done to a KV cache without changing a single later token.

Two questions, answered from the layers that the cache really has rather than from the model's name: may its last
tokens be taken back, and may a prompt be read in pieces, each continuing the cache of the one before?
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from engine.runtime.growing_cache import GrowingLayer
from engine.runtime.growing_window import GrowingWindowLayer

KEEPS_EVERY_TOKEN = (GrowingLayer, DynamicLayer, DynamicIndexedLayer, DummyLayer)
"""Classes whose `crop` takes tokens back exactly.  By exact class: a subclass may hold more state (compressed entries,
recurrent states) that its inherited `crop` does not know of."""

CANNOT_CONTINUE = frozenset({"jamba", "minimax"})
"""Families whose forward over several tokens is not exact on top of an earlier state: a prompt is read in one piece."""


def can_take_back(cache: Cache, tokens: int) -> bool:
    """Whether `cache.crop(-tokens)` leaves exactly the state before those tokens.

    A sliding window can be cropped as long as nothing has slid out of it.
    """
    if tokens == 0:
        return True
    if type(cache) is not DynamicCache:
        return False
    for layer in cache.layers:
        if type(layer) in (DynamicSlidingWindowLayer, GrowingWindowLayer):
            if layer.get_seq_length() >= layer.sliding_window:
                return False
        elif type(layer) not in KEEPS_EVERY_TOKEN:
            return False
    return True


def reorder_cache(cache: Cache, sources: torch.Tensor) -> None:
    """Row i becomes what row `sources[i]` was; [B] int64, where B need not be the present number of rows.

    Not `batch_repeat_interleave` or `batch_select_indices`: layers with recurrent states know only how to reorder.
    """
    cache.reorder_cache(sources)
    # MiniMax's cache keeps linear-attention states beside its layers, where the library forgets to reorder them.
    beside = getattr(cache, "linear_cache", [])
    beside[:] = [s.index_select(0, sources) if isinstance(s, torch.Tensor) else s for s in beside]


def can_continue(model: Any) -> bool:
    """Whether several tokens on top of a cache give the same as all tokens at once."""
    return model.config.get_text_config(decoder=True).model_type not in CANNOT_CONTINUE


def long_rope_boundary(model: Any) -> int | None:
    """The context length beyond which LongRoPE rotates every position differently; `None` without LongRoPE.

    Keys cached on one side of it are of no use on the other (LongRoPE, Ding et al. 2024; transformers switches by the
    longest position of a forward).
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    variants = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    lengths = [
        variant.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for variant in variants
        if variant.get("rope_type") == "longrope"
    ]
    known = [int(length) for length in lengths if length]
    return min(known) if known else None
