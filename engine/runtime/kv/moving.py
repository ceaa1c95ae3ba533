"""Keys and values on their way from a sequence's own cache to pages and back: nothing that was read is read again."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType, PagedLayer
from engine.runtime.kv.growing import GrowingLayer
from engine.runtime.kv.narrow import NarrowLayer
from engine.runtime.kv.parts import has_parts, held_parts, make_rows, parts_of_pages

_NARROW = (KvType.INT8, KvType.FP16)


def can_move(cache: Any, layers: list[PagedLayer], tokens: int) -> bool:
    """Whether a cache that holds `tokens` tokens of one sequence has what these layers would have of them."""
    held = getattr(cache, "layers", [])
    return len(held) == len(layers) and all(
        _fits(states, paged, tokens) for states, paged in zip(held, layers, strict=True)
    )


def move(cache: Any, layers: list[PagedLayer], pages: torch.Tensor, tokens: int, first: int = 0) -> None:
    """Writes the tokens from `first` to `tokens` of a cache that `can_move` into `pages`."""
    places = _Places(pages, first, tokens) if first else None
    for states, paged in zip(cache.layers, layers, strict=True):
        for target, source in zip(parts_of_pages(paged), held_parts(states), strict=True):
            if places is None:
                _fill(target, source[:, :tokens], pages)
            else:
                target[places.pages, :, places.rows] = source[:, first:tokens].transpose(0, 1)


def append(cache: Any, layers: list[PagedLayer], pages: torch.Tensor, tokens: int, first: int) -> None:
    """Makes a cache that holds `first` tokens, and `can_move`, hold those up to `tokens` that are in `pages`."""
    places = _Places(pages, first, tokens)
    for states, paged in zip(cache.layers, layers, strict=True):
        parts = [part[places.pages, :, places.rows].transpose(0, 1) for part in parts_of_pages(paged)]
        for target, source in zip(make_rows(states, tokens - first, parts), parts, strict=True):
            target.copy_(source)


class _Places:
    """Where the tokens from `first` to `tokens` are: in which pages, and where in them."""

    def __init__(self, pages: torch.Tensor, first: int, tokens: int) -> None:
        numbers = torch.arange(first, tokens)
        self.pages, self.rows = pages[numbers // PAGE_TOKENS].long(), numbers % PAGE_TOKENS


def move_back(cache: Any, layers: list[PagedLayer], pages: torch.Tensor, tokens: int) -> bool:
    """Makes an empty cache hold the first `tokens` tokens of these pages; false, and nothing is done, if it cannot."""
    held = getattr(cache, "layers", [])
    if len(held) != len(layers) or not all(_holds_as(*pair) for pair in zip(held, layers, strict=True)):
        return False
    for states, paged in zip(held, layers, strict=True):
        parts = [_taken(part, pages, tokens) for part in parts_of_pages(paged)]
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
    if not has_parts(states, tokens):
        return False
    held, room = held_parts(states), parts_of_pages(paged)
    return len(held) == len(room) and all(
        (source.shape[0], source.shape[2:], source.dtype) == (target.shape[1], target.shape[3:], target.dtype)
        for source, target in zip(held, room, strict=True)
    )


def _fill(target: torch.Tensor, source: torch.Tensor, pages: torch.Tensor) -> None:
    whole, rest = divmod(source.shape[1], PAGE_TOKENS)
    indices = pages.long()
    if whole:
        read = source[:, : whole * PAGE_TOKENS]
        in_pages = read.reshape(read.shape[0], whole, PAGE_TOKENS, *read.shape[2:])
        target[indices[:whole]] = in_pages.transpose(0, 1)
    if rest:
        target[int(indices[whole]), :, :rest] = source[:, whole * PAGE_TOKENS :]
