"""The library's own caches, for models whose layers keep what pages do not hold; and what a cache takes of memory, as
measured when a model is loaded.

A whole cache takes the place of what pages call a state: a row has the one behind its tokens and the one that its next
step writes, others go on from copies, and pages of tokens are only counted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from engine.common.footprint import PAGE_TOKENS, window_pages
from engine.kernels.native.paged_attention import KvType, Piece
from engine.runtime.kv.layers import StateLayer, library_cache
from engine.runtime.kv.paged_cache import PagedCaches, compresses, may_hold
from engine.runtime.kv.pages import PageSizes

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
