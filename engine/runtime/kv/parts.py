"""What a layer holds of one sequence, as tensors that can be copied: from its own cache, or from pages."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DummyLayer

from engine.kernels.native.paged_attention import CompressedPages, LayerPages, PagedLayer
from engine.runtime.kv.growing import GrowingIndexedLayer, GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.narrow import NarrowLayer


def keeps_rows(states: Any) -> bool:
    """Whether a layer never forgets a token, and has each by itself."""
    return type(states) in (GrowingLayer, GrowingIndexedLayer, NarrowLayer, DummyLayer)


def has_parts(states: Any, tokens: int) -> bool:
    """Whether a layer of one sequence has its first `tokens` tokens still, each by itself."""
    if type(states) is DummyLayer:
        return True
    known = keeps_rows(states) or (
        type(states) is GrowingWindowLayer and states.cumulative_length < states.sliding_window
    )
    return known and states.get_seq_length() >= tokens


def held_parts(states: Any) -> list[torch.Tensor]:
    """Keys and values [H, n, D] of the one sequence, and their scales [H, n] if they have any.

    Behind those of an index of tokens come its keys [1, n, D], and positions [axes, n] if it keeps them.
    """
    if type(states) is DummyLayer:
        return []
    if type(states) is NarrowLayer:
        return states.stored()
    parts = [states.keys[0], states.values[0]]
    if type(states) is GrowingIndexedLayer and states.indexer_keys is not None:
        parts.append(states.indexer_keys)
        if states.indexer_position_ids is not None:
            parts.append(states.indexer_position_ids[:, 0])
    return parts


def parts_of_pages(paged: LayerPages | None) -> list[torch.Tensor]:
    """The same of pages: [pages, H, PAGE_TOKENS, D] and [pages, H, PAGE_TOKENS]; states have none of each token."""
    if isinstance(paged, CompressedPages):
        return [*parts_of_pages(paged.recent), *parts_of_pages(paged.entries)]
    if not isinstance(paged, PagedLayer):
        return []
    parts = (paged.keys, paged.values, paged.key_scales, paged.value_scales, paged.index)
    return [part for part in parts if part is not None and part.shape[-1]]


def make_rows(states: Any, tokens: int, first: list[torch.Tensor]) -> list[torch.Tensor]:
    """Makes a layer hold `tokens` more tokens, which the caller writes.

    Args:
        first: the first of these tokens, as `held_parts` has them: it says what an empty layer is going to hold.

    Returns:
        The parts of the new tokens, [H, tokens, D] and [H, tokens], to be written into.

    Raises:
        LookupError: the layer does not hold what `first` has, or holds several sequences.
    """
    if type(states) is DummyLayer:
        return []
    held = states.get_seq_length()
    if held == 0:
        if type(states) is NarrowLayer:
            states.restore(first)
        else:
            states.update(first[0][None], first[1][None])
            for index in first[2:3]:
                states.update_indexer(index)
            for positions in first[3:]:
                states.indexer_position_ids = positions[:, None].clone()
    now = states.get_seq_length()
    if now < held + tokens and states.claim_rows(held + tokens - now) is None:
        raise LookupError("the layer takes no rows from outside")
    parts = held_parts(states)
    if [(part.dtype, part.shape[0], part.shape[2:]) for part in parts] != [
        (part.dtype, part.shape[0], part.shape[2:]) for part in first
    ]:
        raise LookupError("the layer holds something else")
    return [part[:, held:] for part in parts]
