"""Attention on a card, each kernel of it tried with a small problem before it is used for the first time."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

import torch

from engine.kernels.cuda.attention import CudaAttention
from engine.kernels.cuda.driver import Launcher, card_of
from engine.kernels.gpu.pages import PageTable
from engine.kernels.native.paged_attention import (
    PAGE_TOKENS,
    AttentionTerms,
    KvShape,
    KvType,
    PagedLayer,
    Piece,
    Pieces,
)
from engine.kernels.reference import attend_in_torch

_log = logging.getLogger(__name__)

_PROVEN_HELD = (0, 45, 300)
"""Tokens before: nobody else, a part of one block, several blocks whose parts are added."""
_WINDOW = 70


class ProvenAttention:
    """Attention over pages of one card that is known to compute what the definition says."""

    def __init__(self, attention: CudaAttention) -> None:
        self._attention = attention
        self._right: dict[tuple[KvShape, KvType, torch.dtype], bool] = {}

    def attend(
        self,
        table: PageTable,
        terms: AttentionTerms,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        held: torch.Tensor,
        *,
        are_stored: bool = False,
    ) -> torch.Tensor:
        """See `CudaAttention.attend`; a shape that is met for the first time is tried before.

        Raises:
            LookupError: the card has no kernel for it, or it computes something else; nothing was done.
        """
        shape = KvShape(queries.shape[1], keys.shape[1], keys.shape[2], values.shape[2])
        kind = shape, table.kv_type, queries.dtype
        if kind not in self._right:
            self._right[kind] = prove_attention(queries.device, self._attention, shape, table.kv_type, queries.dtype)
        if not self._right[kind]:
            raise LookupError("the card computes no attention with such heads")
        return self._attention.attend(table, terms, queries, keys, values, held, are_stored=are_stored)


def attention_of(device: torch.device) -> ProvenAttention | None:
    """Attention of a card by a kernel; `None`: PyTorch's operators do it."""
    card = card_of(device)
    return _of_card(card) if card is not None else None


@cache
def _of_card(card: Launcher) -> ProvenAttention:
    return ProvenAttention(CudaAttention(card))


def prove_attention(
    device: torch.device, attention: CudaAttention, shape: KvShape, kv_type: KvType, states: torch.dtype
) -> bool:
    """Whether the card computes attention of this shape as the definition does.  Raises nothing."""
    if not attention.takes(shape):
        return False
    try:
        with torch.inference_mode():
            sinks = torch.linspace(-1, 1, shape.heads)
            plain = AttentionTerms(shape.key_dim**-0.5)
            for terms in (plain, replace(plain, window=_WINDOW, kept=3, softcap=20.0, sinks=sinks)):
                for held in _PROVEN_HELD:
                    if not _is_right(device, attention, shape, kv_type, states, terms, held):
                        _log.warning("attention of %s over %s is computed wrongly on %s", shape, kv_type.name, device)
                        return False
    except Exception:  # any compiler or driver error: torch's operators do it
        _log.warning("attention does not run as a kernel on %s", device, exc_info=True)
        return False
    return True


def _is_right(
    device: torch.device,
    attention: CudaAttention,
    shape: KvShape,
    kv_type: KvType,
    states: torch.dtype,
    terms: AttentionTerms,
    held: int,
) -> bool:
    generator = torch.Generator().manual_seed(held)
    pages = held // PAGE_TOKENS + 1
    layer = PagedLayer(shape, kv_type, pages)
    for part in (layer.keys, layer.values):
        drawn = torch.randn(part.shape, generator=generator)
        part.copy_((drawn * 40).clamp(-127, 127).round() if kv_type is KvType.INT8 else drawn)
    for scales in (layer.key_scales, layer.value_scales):
        if scales is not None:
            scales.copy_(torch.rand(scales.shape, generator=generator) / 40)
    parts = [part for part in (layer.keys, layer.values, layer.key_scales, layer.value_scales) if part is not None]
    order = torch.randperm(pages, generator=generator)
    there = [part.to(device, copy=True) for part in parts]
    table = PageTable(kv_type, 1, pages, device)
    table.set_pages(0, order, there)
    new = [
        torch.randn(1, heads, dim, generator=generator).to(states)
        for heads, dim in (
            (shape.heads, shape.key_dim),
            (shape.kv_heads, shape.key_dim),
            (shape.kv_heads, shape.value_dim),
        )
    ]
    # The definition first: it stores the token in its pages, as the card is to do.
    wanted = attend_in_torch(layer, terms, Pieces([Piece(order.to(torch.int32), held, 1)]), *new)
    sinks = terms.sinks.to(device) if terms.sinks is not None else None
    on_card = replace(terms, sinks=sinks)
    before = torch.tensor([held], device=device)
    queries, keys, values = (each.to(device) for each in new)
    out = attention.attend(table, on_card, queries, keys, values, before)
    stored = all(
        torch.allclose(found.cpu().float(), meant.float(), rtol=1e-2, atol=1.0 if kv_type is KvType.INT8 else 1e-3)
        for found, meant in zip(there, parts, strict=True)
    )
    return stored and bool(torch.allclose(out.float().cpu(), wanted.float(), rtol=0.03, atol=0.02))
