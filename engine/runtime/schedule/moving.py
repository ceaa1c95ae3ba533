"""Keys and values on their way from a sequence's own cache to pages and back: nothing that was read is read again."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType, PagedLayer
from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.narrow import NarrowLayer

_NARROW = (KvType.INT8, KvType.FP16)


def can_move(cache: Any, layers: list[PagedLayer], tokens: int) -> bool:
    """Whether a cache that holds `tokens` tokens of one sequence has what these layers would have of them."""
    held = getattr(cache, "layers", [])
    return len(held) == len(layers) and all(
        _fits(states, paged, tokens) for states, paged in zip(held, layers, strict=True)
    )


def move(cache: Any, layers: list[PagedLayer], pages: torch.Tensor, tokens: int) -> None:
    """Writes the first `tokens` tokens of a cache that `can_move` into `pages`."""
    for states, paged in zip(cache.layers, layers, strict=True):
        for target, source in zip(_of_pages(paged), _of_cache(states), strict=True):
            _fill(target, source[:, :tokens], pages)


def move_back(cache: Any, layers: list[PagedLayer], pages: torch.Tensor, tokens: int) -> bool:
    """Makes an empty cache hold the first `tokens` tokens of these pages; false, and nothing is done, if it cannot."""
    held = getattr(cache, "layers", [])
    if len(held) != len(layers) or not all(_holds_as(*pair) for pair in zip(held, layers, strict=True)):
        return False
    for states, paged in zip(held, layers, strict=True):
        parts = [_taken(part, pages, tokens) for part in _of_pages(paged)]
        if type(states) is NarrowLayer:
            states.restore(parts)
        else:
            states.update(parts[0][None], parts[1][None])
    return True


def _holds_as(states: Any, paged: PagedLayer) -> bool:
    return type(states) is (NarrowLayer if paged.kv_type in _NARROW else GrowingLayer)


def _taken(part: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """[pages, H, PAGE_TOKENS, ...] -> [H, tokens, ...]."""
    return part[pages.long()].transpose(0, 1).flatten(1, 2)[:, :tokens]


def _fits(states: Any, paged: PagedLayer, tokens: int) -> bool:
    known = type(states) in (GrowingLayer, NarrowLayer) or (
        type(states) is GrowingWindowLayer and states.cumulative_length < states.sliding_window
    )
    if not known or states.get_seq_length() < tokens:
        return False
    held, room = _of_cache(states), _of_pages(paged)
    return len(held) == len(room) and all(
        (source.shape[0], source.shape[2:], source.dtype) == (target.shape[1], target.shape[3:], target.dtype)
        for source, target in zip(held, room, strict=True)
    )


def _of_cache(states: Any) -> list[torch.Tensor]:
    """Keys and values [H, n, D] of the one sequence, and their scales [H, n] if they have any."""
    if type(states) is NarrowLayer:
        return states.stored()
    return [states.keys[0], states.values[0]]


def _of_pages(paged: PagedLayer) -> list[torch.Tensor]:
    """The same of pages: [pages, H, PAGE_TOKENS, D] and [pages, H, PAGE_TOKENS]."""
    return [part for part in (paged.keys, paged.values, paged.key_scales, paged.value_scales) if part is not None]


def _fill(target: torch.Tensor, source: torch.Tensor, pages: torch.Tensor) -> None:
    whole, rest = divmod(source.shape[1], PAGE_TOKENS)
    indices = pages.long()
    if whole:
        read = source[:, : whole * PAGE_TOKENS]
        in_pages = read.reshape(read.shape[0], whole, PAGE_TOKENS, *read.shape[2:])
        target[indices[:whole]] = in_pages.transpose(0, 1)
    if rest:
        target[int(indices[whole]), :, :rest] = source[:, whole * PAGE_TOKENS :]
