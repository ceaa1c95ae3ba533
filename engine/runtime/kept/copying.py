"""Blocks from a sequence's own cache or its pages, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.kernels.native.paged_attention import PAGE_TOKENS, PagedLayer
from engine.runtime.kept.block import BLOCK_TOKENS, BlockLayout
from engine.runtime.kept.prefixes import CopyBlock, Found
from engine.runtime.kv.parts import held_parts, make_rows, parts_of_pages

_PAGES = BLOCK_TOKENS // PAGE_TOKENS


def from_cache(cache: Any, layout: BlockLayout) -> CopyBlock:
    """Copies blocks of what a cache of this layout holds at that time."""

    def copy(index: int, data: torch.Tensor) -> None:
        for states, parts in zip(cache.layers, layout.parts(data), strict=True):
            for target, source in zip(parts, held_parts(states), strict=True):
                target.copy_(source.narrow(1, index * BLOCK_TOKENS, BLOCK_TOKENS))

    return copy


def into_cache(found: Found, cache: Any, held: int, device_of: Callable[[int], torch.device]) -> int:
    """Appends what was found, from its first whole block behind the `held` tokens that the cache has, which end there.

    Args:
        device_of: a layer, by its number.

    Returns:
        Tokens that the cache holds now.

    Raises:
        LookupError: it is none of this layout; it may hold anything then.
    """
    layout, first = found.layout, held // BLOCK_TOKENS
    if len(layout.layers) != len(cache.layers):
        raise LookupError("the cache has other layers")
    rows = []
    for number, (states, parts) in enumerate(zip(cache.layers, layout.layers, strict=True)):
        device = device_of(number)
        empty = [part.zeros(device) for part in parts]
        rows.append(make_rows(states, found.tokens - held, empty))

    def take(index: int, data: torch.Tensor) -> None:
        begin = (index - first) * BLOCK_TOKENS
        for targets, parts in zip(rows, layout.parts(data), strict=True):
            for target, source in zip(targets, parts, strict=True):
                target.narrow(1, begin, BLOCK_TOKENS).copy_(source)

    wanted = found.tokens
    there = found.bring(first, take)
    if there < wanted:
        for states in cache.layers:
            states.crop(there - wanted)
    return there


def from_pages(layers: Sequence[PagedLayer], pages: torch.Tensor, layout: BlockLayout) -> CopyBlock:
    """Copies blocks of the sequence that these pages hold."""
    places = pages.tolist()

    def copy(index: int, data: torch.Tensor) -> None:
        for paged, parts in zip(layers, layout.parts(data), strict=True):
            for target, source in zip(parts, parts_of_pages(paged), strict=True):
                for number in range(_PAGES):
                    mine = target.narrow(1, number * PAGE_TOKENS, PAGE_TOKENS)
                    mine.copy_(source[places[index * _PAGES + number]])

    return copy


def into_pages(found: Found, layers: Sequence[PagedLayer], pages: torch.Tensor, held: int) -> int:
    """Writes what was found behind the first `held` tokens, which end a page; returns the tokens that are there now."""
    places, begun = pages.tolist(), held // PAGE_TOKENS

    def take(index: int, data: torch.Tensor) -> None:
        for paged, parts in zip(layers, found.layout.parts(data), strict=True):
            for source, target in zip(parts, parts_of_pages(paged), strict=True):
                for number in range(_PAGES):
                    page = index * _PAGES + number
                    if page >= begun:
                        target[places[page]].copy_(source.narrow(1, number * PAGE_TOKENS, PAGE_TOKENS))

    return max(held, found.bring(held // BLOCK_TOKENS, take))
