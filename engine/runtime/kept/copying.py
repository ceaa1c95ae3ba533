"""Blocks from a sequence's pages, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.kernels.native.paged_attention import PAGE_TOKENS, LayerPages, Piece
from engine.runtime.kept.block import BLOCK_TOKENS, BlockLayout
from engine.runtime.kept.prefixes import CopyBlock, Found
from engine.runtime.kept.state import restore_pages
from engine.runtime.kv.paged_cache import parts_of_pages

_PAGES = BLOCK_TOKENS // PAGE_TOKENS


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
