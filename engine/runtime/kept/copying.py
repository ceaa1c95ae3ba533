"""Blocks from a sequence's own cache or its pages, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from engine.kernels.native.paged_attention import PAGE_TOKENS, LayerPages, Piece
from engine.runtime.kept.block import BLOCK_TOKENS, BlockLayout, PartShape
from engine.runtime.kept.prefixes import CopyBlock, Found
from engine.runtime.kept.state import restore, restore_pages, restore_window
from engine.runtime.kv.growing import GrowingWindowLayer
from engine.runtime.kv.parts import held_parts, make_rows, parts_of_pages

_PAGES = BLOCK_TOKENS // PAGE_TOKENS


def from_cache(cache: Any, layout: BlockLayout) -> CopyBlock:
    """Copies blocks of what a cache of this layout holds at that time."""

    def copy(index: int, data: torch.Tensor) -> None:
        for states, parts in zip(cache.layers, layout.parts(data), strict=True):
            for target, source in zip(parts, held_parts(states) if parts else [], strict=True):
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
    layout, first, wanted = found.layout, held // BLOCK_TOKENS, len(found.keys) * BLOCK_TOKENS
    if found.keys and len(layout.layers) != len(cache.layers):
        raise LookupError("the cache has other layers")
    rows = [
        _rows(states, parts, held, wanted, device_of(number)) if parts else (held, [])
        for number, (states, parts) in enumerate(zip(cache.layers, layout.layers, strict=bool(found.keys)))
    ]

    def take(index: int, data: torch.Tensor) -> None:
        start = index * BLOCK_TOKENS
        for (begin, targets), parts in zip(rows, layout.parts(data), strict=True):
            skipped = max(0, begin - start)
            for target, source in zip(targets, parts, strict=True):
                if skipped < BLOCK_TOKENS:
                    mine = source[:, skipped:]
                    target.narrow(1, start + skipped - begin, mine.shape[1]).copy_(mine)

    there = found.bring(first, take) if found.keys else 0
    slid = [pair for pair in zip(cache.layers, rows, strict=False) if pair[1][0] > held]
    if there < wanted:
        if found.state is not None or slid:
            raise LookupError("a block is damaged")
        for states in cache.layers:
            states.crop(there - wanted)
    for states, (_begin, (keys, values)) in slid:
        restore_window(states, [keys[None], values[None]], wanted)
    if found.state is None:
        return there
    if not found.bring_state(lambda state, data: restore(cache, state, data, device_of)):
        raise LookupError("what layers held is damaged")
    return found.tokens


def _rows(
    states: Any, parts: Sequence[PartShape], held: int, tokens: int, device: torch.device
) -> tuple[int, list[torch.Tensor]]:
    """Room for what a layer needs of the tokens behind `held` and before `tokens`, and where that begins."""
    empty = [part.zeros(device) for part in parts]
    if type(states) is not GrowingWindowLayer or tokens < states.sliding_window:
        return held, make_rows(states, tokens - held, empty)
    if held:
        raise LookupError("a window slides from its beginning")
    rows = states.sliding_window - 1
    return tokens - rows, [each.new_empty(each.shape[0], rows, *each.shape[2:]) for each in empty]


def from_pages(
    layers: Sequence[LayerPages | None], places: Sequence[int] | Mapping[int, int], layout: BlockLayout
) -> CopyBlock:
    """Copies blocks of the sequence that these pages hold."""

    def copy(index: int, data: torch.Tensor) -> None:
        for paged, parts in zip(layers, layout.parts(data), strict=True):
            for target, source in zip(parts, parts_of_pages(paged), strict=True):
                for number in range(_PAGES):
                    mine = target.narrow(1, number * PAGE_TOKENS, PAGE_TOKENS)
                    mine.copy_(source[places[index * _PAGES + number]])

    return copy


def state_into_pages(found: Found, layers: Sequence[LayerPages], piece: Piece) -> bool:
    """Writes what was found, of which a sequence holds some, to its pages and to the state that it goes on to.

    Returns:
        Whether all of it is sound, and of these layers: else nothing of it is of use.
    """
    if found.keys and found.layout != BlockLayout.of_pages(layers):
        return False
    blocks = len(found.keys) * BLOCK_TOKENS
    if found.keys and into_pages(found, layers, piece.pages, min(piece.held, blocks)) < blocks:
        return False
    try:
        return found.bring_state(lambda state, data: restore_pages(layers, piece, state, data))
    except LookupError:
        return False


def into_pages(found: Found, layers: Sequence[LayerPages | None], pages: torch.Tensor, held: int) -> int:
    """Writes what was found behind the first `held` tokens, which end a page; returns the tokens that are there now."""
    places, begun = pages.tolist(), held // PAGE_TOKENS

    def take(index: int, data: torch.Tensor) -> None:
        for number in range(_PAGES):
            if (place := index * _PAGES + number) >= begun:
                page_from_block(data, number, found.layout, layers, places[place])

    return max(held, found.bring(held // BLOCK_TOKENS, take))


def page_from_block(
    data: torch.Tensor,
    number: int,
    layout: BlockLayout,
    layers: Sequence[LayerPages | None],
    page: int,
) -> None:
    """Writes a page of a block to this one, the block's first being number 0."""
    for paged, parts in zip(layers, layout.parts(data), strict=True):
        for source, target in zip(parts, parts_of_pages(paged), strict=True):
            target[page].copy_(source.narrow(1, number * PAGE_TOKENS, PAGE_TOKENS))
