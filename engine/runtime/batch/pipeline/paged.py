"""Attention of many rows over pages on a card: single tokens by its kernel in one launch, prompts by PyTorch's fused
attention over their pages."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from engine.devices.device import upload
from engine.kernels.gpu.pages import PageTable
from engine.kernels.gpu.proof import attention_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import (
    PAGE_TOKENS,
    AttentionTerms,
    PagedLayer,
    Piece,
    Pieces,
    attend,
    pages_from,
)
from engine.kernels.reference import attend_in_torch, store_tokens
from engine.runtime.kv.paged_cache import parts_of_pages
from engine.runtime.kv.tabled import gathered_pages

_MASK_ELEMENTS = 2**25
"""Of masks that are made at a time: sinks take one for each head."""


class PagedAttention:
    """Attention on one device.  A step's calls must come one after the other, from any thread.

    `engine.kernels.reference.attend_in_torch` is the definition.

    Args:
        native: kernels that stand for the card's where the device is an emulated one.
    """

    def __init__(self, device: torch.device, native: NativeKernels | None) -> None:
        self._device, self._native = device, native
        self._kernel = attention_of(device)
        self._table: PageTable | None = None
        self._sinks: dict[int, torch.Tensor] = {}

    def attend(
        self,
        layer: PagedLayer,
        terms: AttentionTerms,
        rows: PlacedRows,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Stores the new tokens in their pages, and attends.

        Args:
            layer: pages on the device.
            queries, keys, values: [T, heads, dim] on the device.

        Returns:
            [T, heads, value_dim], of the same type.
        """
        if self._kernel is None and self._native is not None and queries.dtype in (torch.bfloat16, torch.float32):
            return attend(self._native, layer.struct(terms), rows.pieces, queries, keys, values)
        terms = self._on_device(terms)
        page, slot = upload(torch.stack((rows.page, rows.slot)), self._device).unbind()
        store_tokens(layer, page, slot, keys, values)
        out = queries.new_empty(len(queries), layer.shape.heads, layer.shape.value_dim)
        places = [first for first, tokens in zip(rows.first, rows.tokens, strict=True) if tokens == 1]
        if places:
            self._put(out, places, self._of_tokens(layer, terms, rows, places, queries, keys, values))
        for row, (begin, tokens) in enumerate(zip(rows.first, rows.tokens, strict=True)):
            if tokens == 1:
                continue
            end = begin + tokens
            if not terms.softcap:
                out[begin:end] = self._fused(layer, terms, rows, [row], queries[begin:end][None])[0]
            else:
                out[begin:end] = self._of_tokens(layer, terms, rows, list(range(begin, end)), queries, keys, values)
        return out

    def _of_tokens(
        self,
        layer: PagedLayer,
        terms: AttentionTerms,
        rows: PlacedRows,
        places: list[int],
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """[n, heads, value_dim] of these tokens, all of which are in their pages."""
        index = torch.tensor(places)
        if len(places) < len(queries):
            there = upload(index, self._device)
            queries, keys, values = (states.index_select(0, there) for states in (queries, keys, values))
        if self._kernel is not None:
            try:
                table = self._tabled(layer, rows.pages[rows.of_row[index]])
                held = upload(rows.position[index], self._device)
                return self._kernel.attend(table, terms, queries, keys, values, held, are_stored=True)
            except LookupError:  # heads that it does not take, or it is wrong on this card: the log says which
                self._kernel = None
        if terms.softcap:
            alone = rows.alone(places)
            return attend_in_torch(layer, terms, alone, queries, keys, values)
        return self._fused(layer, terms, rows, rows.of_row[index].tolist(), queries[:, None])[:, 0]

    def _fused(
        self, layer: PagedLayer, terms: AttentionTerms, rows: PlacedRows, of: list[int], queries: torch.Tensor
    ) -> torch.Tensor:
        """[R, T, heads, value_dim] of rows with T tokens each, over copies of their pages one after the other."""
        count, tokens = queries.shape[:2]
        held = rows.held[of]
        end = int(held.max()) + tokens
        first = 0
        if terms.window and not terms.kept:  # pages that nobody sees any more stay where they are
            first = max(0, int(held.min()) + 1 - terms.window) // PAGE_TOKENS
        numbers = upload(rows.pages[of, first : -(-end // PAGE_TOKENS)], self._device)
        begin = first * PAGE_TOKENS
        keys, values = (part[:, :, : end - begin] for part in gathered_pages(layer, numbers, queries.dtype))
        is_grouped = layer.shape.heads != layer.shape.kv_heads
        asked = queries.transpose(1, 2)
        if count == 1 and tokens in (1, end) and not terms.window and terms.sinks is None:
            return _attended(asked, keys, values, None, terms.scale, is_grouped=is_grouped).transpose(1, 2)
        place = torch.arange(begin, end, device=self._device)
        of_row = upload(held, self._device)
        # What no token of a row sees may be anything, also no number, which a share of zero would not take away.
        unseen = place >= of_row[:, None] + tokens
        if terms.window:
            unseen |= (place <= of_row[:, None] - terms.window) & (place >= terms.kept)
        for part in (keys, values):
            part.masked_fill_(unseen[:, None, :, None], 0)
        if terms.sinks is not None:  # attending to nothing is attending to a key whose value is zero
            keys, values = (torch.nn.functional.pad(part, (0, 0, 0, 1)) for part in (keys, values))
        each = keys.shape[2] * count * (layer.shape.heads if terms.sinks is not None else 1)
        out, at_once = [], max(1, _MASK_ELEMENTS // each)
        for since in range(0, tokens, at_once):
            some = asked[:, :, since : since + at_once]
            own = of_row[:, None] + torch.arange(since, since + some.shape[2], device=self._device)
            mask = self._mask(terms, own[:, None, :, None], place, queries.dtype)
            out.append(_attended(some, keys, values, mask, terms.scale, is_grouped=is_grouped))
        return torch.cat(out, 2).transpose(1, 2)

    @staticmethod
    def _mask(terms: AttentionTerms, own: torch.Tensor, place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[R, 1, T, n] of what tokens at `own` see of `place`, or with sinks [R, heads, T, n + 1], to be added."""
        seen = place <= own
        if terms.window:
            seen &= (place > own - terms.window) | (place < terms.kept)
        if terms.sinks is None:
            return seen
        hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        sinks = terms.sinks.to(dtype).view(1, -1, 1, 1)
        shape = (seen.shape[0], len(terms.sinks), seen.shape[2])
        return torch.cat((hidden.expand(*shape, -1), sinks.expand(*shape, 1)), 3)

    def _tabled(self, layer: PagedLayer, pages: torch.Tensor) -> PageTable:
        """The pages [R, P] of so many sequences, in a table that stays where it is as long as it is large enough."""
        count, most = pages.shape
        table = self._table
        if (
            table is None
            or table.kv_type is not layer.kv_type
            or table.entries.shape[0] < count
            or (table.entries.shape[2] <= most)
        ):
            had = table.entries.shape if table is not None and table.kv_type is layer.kv_type else (0, 0, 0)
            table = PageTable(layer.kv_type, max(count, had[0]), max(most, had[2] - 1), self._device)
            self._table = table
        entries = table.entries_of(pages, parts_of_pages(layer))
        table.entries[:count, :, : 1 + most].copy_(upload(entries, self._device))
        return table

    def _on_device(self, terms: AttentionTerms) -> AttentionTerms:
        if terms.sinks is None or terms.sinks.device == self._device:
            return terms
        there = self._sinks.get(id(terms))
        if there is None:
            there = self._sinks[id(terms)] = terms.sinks.to(self._device)
        return replace(terms, sinks=there)

    def _put(self, out: torch.Tensor, places: list[int], found: torch.Tensor) -> None:
        if len(places) == len(out):
            out.copy_(found)
        else:
            out.index_copy_(0, upload(torch.tensor(places), self._device), found)


class PlacedRows:
    """Where the tokens of some rows are, as arrays on the host.

    Attributes:
        pages: int64 [R, P], page numbers, 0 beyond a row's own and where a window has passed.
        held, end: int64 [R], tokens before, and with the new ones.
        tokens, first: new ones of each row, and the place of the first one among all.
        of_row, position: int64 [T], the row of each new token and its place in the row.
        page, slot: int64 [T], its page and its place there.

    Args:
        window: of the layers; 0 without one.
    """

    def __init__(self, pieces: Pieces, window: int = 0) -> None:
        self.pages = pad_sequence([pages_from(piece, window).long() for piece in pieces.pieces], batch_first=True)
        self.held = torch.tensor([piece.held for piece in pieces.pieces])
        self.tokens = [piece.tokens for piece in pieces.pieces]
        counts = torch.tensor(self.tokens)
        begins = counts.cumsum(0) - counts
        self.end, self.first = self.held + counts, begins.tolist()
        self.of_row = torch.repeat_interleave(counts)
        self.position = torch.arange(pieces.tokens) - begins[self.of_row] + self.held[self.of_row]
        self.slot = self.position % PAGE_TOKENS
        self.page = self.pages[self.of_row, self.position // PAGE_TOKENS]

    def at(self, pages: torch.Tensor) -> PlacedRows:
        """The same with other pages."""
        moved = copy(self)
        moved.pages, moved.page = pages, pages[self.of_row, self.position // PAGE_TOKENS]
        return moved

    @property
    def pieces(self) -> Pieces:
        """As native kernels take them."""
        pages, held = self.pages.int(), self.held.tolist()
        return Pieces([Piece(*each) for each in zip(pages, held, self.tokens, strict=True)])

    def alone(self, places: list[int]) -> Pieces:
        """These tokens, each as the next one of a sequence of its own."""
        pages = self.pages.int()
        return Pieces([Piece(pages[self.of_row[place]], int(self.position[place]), 1) for place in places])


def work_of(layer: PagedLayer, terms: AttentionTerms, rows: PlacedRows) -> tuple[float, float]:
    """(bytes that a kernel reads, flops) of these rows' attention."""
    seen = rows.end.clamp(max=terms.window + terms.kept) if terms.window else rows.end
    shape = layer.shape
    flops = 2.0 * float((seen * torch.tensor(rows.tokens)).sum()) * shape.heads * (shape.key_dim + shape.value_dim)
    return float(seen.sum()) * shape.page_bytes(layer.kv_type) / PAGE_TOKENS, flops


def _attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    is_grouped: bool,
) -> torch.Tensor:
    """[R, heads, T, value_dim]; without a mask each of several tokens sees those before it."""
    is_causal = mask is None and queries.shape[2] > 1
    return scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )
