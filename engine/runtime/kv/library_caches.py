"""The library's own caches, for models whose layers keep what pages do not hold.

A whole cache takes the place of what pages call a state: a row has the one behind its tokens and the one that its next
step writes, others go on from copies, and pages of tokens are only counted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from engine.kernels.native.paged_attention import Piece
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.memory import cache_tensors

_JOINABLE = (DynamicLayer, DynamicSlidingWindowLayer)
_REPLACING = (*_JOINABLE, DynamicIndexedLayer, DummyLayer)
"""Layers, by exact class, that never write to a tensor that they hold: copies of them share it."""
_HYBRID = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""The same of keys and values only."""


@dataclass(frozen=True)
class Encoded:
    """What a decoder goes on from: the prompt as the encoder has read it, and its caches."""

    source: Any
    mask: torch.Tensor
    cache: EncoderDecoderCache


class LibraryCaches:
    """Of one model's sequences, by the numbers of their states; see `PagedCaches`, in whose place it is."""

    have_states = True
    are_of_card = False
    state_generation = 0

    def __init__(self, model: Any) -> None:
        self._model, self._encodes = model, bool(getattr(model.config, "is_encoder_decoder", False))
        self._held: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        """Of all of them.  May be asked while a forward runs."""
        held = list(self._held.values())
        return sum({id(part): part.nbytes for cache in held for part in cache_tensors(cache)}.values())

    def of(self, piece: Piece, *, passes: bool = False) -> Any:  # noqa: ARG002 - as of `PagedCaches`
        """A sequence's, for a forward of its next tokens; None if the model makes that itself, see `keep`."""
        if not piece.held:
            self._held[piece.next_state] = None if self._encodes else library_cache(self._model)
        elif piece.state != piece.next_state:
            self.copy_state(piece.state, piece.next_state)
        return self._held[piece.next_state]

    def keep(self, piece: Piece, cache: Any) -> None:
        self._held[piece.next_state] = cache

    def together(self, pieces: Sequence[Piece]) -> Any:
        """A cache of as many rows, for the next tokens of a search's beams; None if their layers cannot be joined."""
        own = [self.of(piece) for piece in pieces]
        layers = [_layers(each) for each in own]
        if not layers[0] or any(type(layer) not in _JOINABLE for layer in layers[0]):
            return None
        joined = _copy(own[0])
        for layer, each in zip(_layers(joined), zip(*layers, strict=True), strict=True):
            layer.keys, layer.values = (torch.cat([getattr(its, name) for its in each]) for name in ("keys", "values"))
        if not isinstance(joined, Encoded):
            return joined
        width, source = len(pieces), copy.copy(joined.source)
        source["last_hidden_state"] = source.last_hidden_state.expand(width, -1, -1)
        crossed = _copy(joined.cache.cross_attention_cache)
        for layer in crossed.layers:
            layer.keys, layer.values = (part.expand(width, -1, -1, -1) for part in (layer.keys, layer.values))
        return Encoded(
            source, joined.mask.expand(width, -1), EncoderDecoderCache(joined.cache.self_attention_cache, crossed)
        )

    def apart(self, pieces: Sequence[Piece], joined: Any) -> None:
        """After their forward: each beam has its own cache again."""
        for row, piece in enumerate(pieces):
            for layer, its in zip(_layers(self._held[piece.next_state]), _layers(joined), strict=True):
                vars(layer).update(vars(its), keys=its.keys[row : row + 1], values=its.values[row : row + 1])

    def copy_state(self, source: int, target: int) -> None:
        self._held[target] = _copy(self._held[source])

    def clear_state(self, state: int) -> None:
        self._held.pop(state, None)

    def discard_states(self, states: Sequence[int]) -> None:
        for state in states:
            self.clear_state(state)

    def close(self) -> None:
        self._held.clear()

    def copy_page(self, source: int, target: int) -> None:
        """Pages hold nothing."""

    def discard(self, pages: Sequence[int]) -> None:
        """Pages hold nothing."""

    def discard_windows(self, pages: Sequence[int]) -> None:
        """There are none."""


def _layers(cache: Any) -> list[Any]:
    """Those that tokens of a decoder are added to, of a cache that the library makes for all models alike."""
    own = cache.cache.self_attention_cache if isinstance(cache, Encoded) else cache
    return list(own.layers) if type(own) is DynamicCache else []


def _copy(cache: Any) -> Any:
    """The same as it is now, whatever becomes of the other."""
    if isinstance(cache, Encoded):
        both = _copy(cache.cache.self_attention_cache), cache.cache.cross_attention_cache
        return replace(cache, cache=EncoderDecoderCache(*both))
    if type(cache) is not DynamicCache:
        return copy.deepcopy(cache)
    found = copy.copy(cache)
    found.layers = list(map(_copy_of_layer, cache.layers))
    return found


def _copy_of_layer(layer: Any) -> Any:
    if type(layer) in _REPLACING:
        return copy.copy(layer)
    shared = (layer.keys, layer.values) if type(layer) in _HYBRID else ()
    return copy.deepcopy(layer, {id(part): part for part in shared})
