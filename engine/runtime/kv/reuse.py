"""What may be done to a KV cache without changing a single later token.

Two questions, answered from the layers that the cache really has rather than from the model's name: may its last
tokens be taken back, and if not, can it return to a snapshot?
"""

from __future__ import annotations

import copy
from typing import Any

from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from engine.families import family_of
from engine.runtime.kv.growing import GrowingIndexedLayer, GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.memory import cache_layer_bytes
from engine.runtime.kv.narrow import NarrowLayer
from engine.runtime.kv.window_masks import window_of_cache_alone

BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose angles depend on how long the context of a forward is, and not on the position alone."""
KEEPS_EVERY_TOKEN = (GrowingLayer, GrowingIndexedLayer, NarrowLayer, DynamicLayer, DynamicIndexedLayer, DummyLayer)
"""Classes whose `crop` takes tokens back exactly.  By exact class: a subclass may hold more state (compressed entries,
recurrent states) that its inherited `crop` does not know of."""


def rotary_embeddings(model: Any) -> list[Any]:
    """The modules of a model that make angles of positions."""
    return [module for module in model.modules() if hasattr(module, "original_max_seq_len")]


def rope_kinds(rotary: Any) -> list[str]:
    """Of a module, one for each type of layer that it distinguishes.

    As the module has it: HunYuan's `dynamic` is one whose angles are fixed.
    """
    kinds = rotary.rope_type
    return [str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])]


def kinds_by_length(model: Any) -> set[str]:
    """Those of `BY_LENGTH` that a model has."""
    return {kind for rotary in rotary_embeddings(model) for kind in rope_kinds(rotary)} & set(BY_LENGTH)


def restart_angles(model: Any) -> None:
    """Dynamic angles are again those of a short context.

    The library keeps those of the longest context that there was, so that an answer would depend on earlier ones.
    """
    for rotary in rotary_embeddings(model):
        by_layer = isinstance(rotary.rope_type, dict)
        for name, kind in rotary.rope_type.items() if by_layer else [("", rotary.rope_type)]:
            prefix = f"{name}_" if by_layer else ""
            cached = f"{prefix}max_seq_len_cached"
            if kind != "dynamic" or getattr(rotary, cached, 0) == rotary.original_max_seq_len:
                continue
            original, now = getattr(rotary, f"{prefix}original_inv_freq"), getattr(rotary, f"{prefix}inv_freq")
            rotary.register_buffer(f"{prefix}inv_freq", original.to(now.device), persistent=False)
            setattr(rotary, cached, rotary.original_max_seq_len)


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


_FEW_INDEX_HEADS = 16
"""An index scores a token by a sum over its heads, of which each is 0 for every other token: where all are, tokens tie.
With 64 heads, as in DeepSeek-V3.2, that does not happen; with 16 it does once in 65,000."""


def exact_tokens(model: Any) -> int:
    """The longest context within which an answer does not depend on which of its tokens are computed together.

    Beyond it the library's answer is that of a prompt computed at once, followed by single tokens:

    - the family has a limit of its own (Doge's experts mix the routing of all tokens of a forward);
    - a dynamic rotary embedding, and LongRoPE of most families, turns the tokens of a forward by the length of the
      context then, and those before keep their angles;
    - where the library's cache slides by a window that its masks do not have, a prompt sees all that comes before it;
    - an index of the most important tokens that has few heads finds many of them equally important, and which of these
      are taken depends on how many there are.
    """
    config = model.config.get_text_config(decoder=True)
    limits = [window_of_cache_alone(model)]
    family = family_of(config.model_type)
    own = family.exact_tokens(config.to_dict()) if family.exact_tokens is not None else None
    if own is not None:
        limits.append(own)
    if any(kind == "dynamic" for rotary in rotary_embeddings(model) for kind in rope_kinds(rotary)):
        limits.append(int(config.max_position_embeddings))
    long_rope = _long_rope_length(model)
    if long_rope is not None and not family.rotates_again:
        limits.append(long_rope)
    heads = getattr(config, "index_n_heads", None) or getattr(config, "indexer_n_heads", None)
    chosen = getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None)
    if heads and chosen and heads <= _FEW_INDEX_HEADS:
        limits.append(int(chosen))
    return min(limits)


def long_rope_boundary(model: Any) -> int | None:
    """The context length beyond which LongRoPE rotates every position differently; `None` without LongRoPE.

    Keys cached on one side of it are of no use on the other (LongRoPE, Ding et al. 2024; transformers switches by the
    longest position of a forward).  `None` too for families whose earlier tokens keep their angles.
    """
    config = model.config.get_text_config(decoder=True)
    return _long_rope_length(model) if family_of(config.model_type).rotates_again else None


def _long_rope_length(model: Any) -> int | None:
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


class KvSnapshot:
    """What `length` tokens left in a cache.

    Args:
        cache: a cache that holds exactly these tokens; `worth_taking` says whether this is of use for it.
    """

    def __init__(self, cache: Cache, length: int) -> None:
        self.length = length
        self._forgetful: dict[int, Any] = {
            index: copy.deepcopy(layer) for index, layer in enumerate(cache.layers) if not _keeps_all(layer)
        }

    @property
    def forgetful(self) -> dict[int, Any]:
        """The layers that forget, as they were, by their numbers."""
        return self._forgetful

    @property
    def nbytes(self) -> int:
        """What those take."""
        return sum(cache_layer_bytes(Cache(layers=list(self._forgetful.values()))))

    @staticmethod
    def worth_taking(cache: Cache) -> bool:
        """Whether the cache has layers that forget, all of them inside its list of layers."""
        return type(cache) is DynamicCache and not all(_keeps_all(layer) for layer in cache.layers)

    def give_up(self, cache: Cache) -> None:
        """Takes a cache back to what it was, whatever layers have taken in since."""
        for index, layer in enumerate(cache.layers):
            if index in self._forgetful:
                cache.layers[index] = self._forgetful[index]
            elif (more := layer.get_seq_length() - self.length) > 0:
                layer.crop(-more)

    def restore(self, cache: Cache, tokens: int) -> None:
        """Takes a cache that now holds `tokens` tokens, the first `length` of them the same, back to those."""
        for index, layer in enumerate(cache.layers):
            if index in self._forgetful:
                cache.layers[index] = copy.deepcopy(self._forgetful[index])
            else:
                layer.crop(self.length - tokens)


def forgetful_bytes(cache: Cache) -> int:
    """What the layers take that forget."""
    return sum(cache_layer_bytes(Cache(layers=[layer for layer in cache.layers if not _keeps_all(layer)])))


def _keeps_all(layer: Any) -> bool:
    return type(layer) in KEEPS_EVERY_TOKEN
