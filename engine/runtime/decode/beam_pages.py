"""Beams over pages: they share what they have in common, and each step of all of them is one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.kernels.native.paged_attention import PAGE_TOKENS, KvShape, KvType, PagedLayer, Piece, Pieces
from engine.kernels.native.structs import PagesStruct
from engine.runtime.decode.step_model import TokenStep
from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.narrow import NarrowLayer
from engine.runtime.kv.pages import PagePool, pages_for
from engine.runtime.kv.parts import has_parts, held_parts, parts_of_pages
from engine.telemetry.recorder import RECORDER

_KNOWN = (GrowingLayer, GrowingWindowLayer, NarrowLayer)
_TYPES = {kv_type.dtype: kv_type for kv_type in KvType}
_SPARE_PAGES = 4
"""For each beam, before there is need for more."""


class BeamPages:
    """Several sequences that begin with what a cache holds: forks of its pages.

    Args:
        step: computes a token of each.
        cache: one that `can_fork`; it stays as it is.
        length: tokens that it holds.
    """

    def __init__(self, step: TokenStep, cache: Cache, length: int, width: int) -> None:
        self._step, self._length = step, length
        self._windows = [getattr(layer, "sliding_window", 0) or 0 for layer in cache.layers]
        self._pool = PagePool(pages_for(length) + width * _SPARE_PAGES)
        self._layers = [_paged(layer, self._pool.capacity) for layer in cache.layers]
        self._held = self._structs()
        prompt = [self._take() for _ in range(pages_for(length))]
        fill_pages(cache, self._layers, torch.tensor(prompt), length)
        self._pages = [list(prompt) for _ in range(width)]
        for page in prompt * (width - 1):
            self._pool.fork(page)

    @staticmethod
    def can_fork(cache: Cache, tokens: int) -> bool:
        """Whether all that a cache of one sequence holds, `tokens` tokens, can be in pages."""
        return all(type(layer) in _KNOWN and layer.can_claim(1) and has_parts(layer, tokens) for layer in cache.layers)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends one token to each sequence, tokens [B, 1]; logits [B, V]."""
        if RECORDER.on:
            RECORDER.forward()
        for pages in self._pages:
            self._make_room(pages)
        tables = [torch.tensor(pages, dtype=torch.int32) for pages in self._pages]
        pieces = Pieces([Piece(table, self._length, 1) for table in tables])
        positions = [self._length] * len(tables)
        logits = self._step.rows(tokens[:, 0].tolist(), positions, self._held, pieces)
        self._length += 1
        if RECORDER.on:
            RECORDER.head()
        return logits

    def reorder(self, sources: torch.Tensor) -> None:
        """Sequence i continues what sequence `sources[i]` was; [B] int64."""
        before, self._pages = self._pages, [list(self._pages[source]) for source in sources.tolist()]
        for pages in self._pages:
            for page in pages:
                self._pool.fork(page)
        for pages in before:
            for page in pages:
                self._pool.release(page)

    def _make_room(self, pages: list[int]) -> None:
        """The next token's page is one that nobody else holds."""
        place = self._length // PAGE_TOKENS
        if place == len(pages):
            pages.append(self._take())
        elif self._pool.is_forked(shared := pages[place]):
            own = pages[place] = self._take()
            for layer in self._layers:
                for part in parts_of_pages(layer):
                    part[own] = part[shared]
            self._pool.release(shared)

    def _take(self) -> int:
        if not self._pool.reserve(1):
            more = self._pool.capacity
            self._pool.grow(more)
            self._layers = [layer.with_more(more) for layer in self._layers]
            self._held = self._structs()
            self._pool.reserve(1)
        return self._pool.take()

    def _structs(self) -> list[PagesStruct]:
        return [layer.held(window) for layer, window in zip(self._layers, self._windows, strict=True)]


def _paged(states: Any, pages: int) -> PagedLayer:
    """Pages for what a cache's layer holds of one sequence: of keys and values, or of latents and rotary keys."""
    keys, values, *_ = held_parts(states)
    shape = KvShape(keys.shape[0], keys.shape[0], keys.shape[-1], values.shape[-1])
    return PagedLayer(shape, _TYPES[keys.dtype], pages)


def fill_pages(cache: Any, layers: Sequence[PagedLayer], pages: torch.Tensor, tokens: int) -> None:
    """Writes the first `tokens` tokens of one sequence's cache into pages that hold the same of each."""
    numbers = torch.arange(tokens)
    places, rows = pages[numbers // PAGE_TOKENS].long(), numbers % PAGE_TOKENS
    for states, paged in zip(cache.layers, layers, strict=True):
        for target, source in zip(parts_of_pages(paged), held_parts(states), strict=True):
            target[places, :, rows] = source[:, :tokens].transpose(0, 1)
