"""The library's attention modules over pages of a card.

The library's masks are not built.  What a token sees follows from the rule by which a mask would be, which is looked at
when a step is computed for the first time; later steps ask for the same masks in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels.gpu.proof import ProvenAttention, attention_of
from engine.kernels.native.paged_attention import PAGE_TOKENS, AttentionTerms
from engine.runtime.decoder_layers import stays
from engine.runtime.kv.library_attention import attending_by, configs_of, window_of
from engine.runtime.kv.tabled import RowsCache, RowsLayer, gathered_pages


class TabledAttention:
    """Attention of a model's steps over pages.

    Args:
        model: from transformers.
        kernels: of the devices that have any; PyTorch's operators attend on others.
        context_tokens: longest context: a window that is not shorter hides nothing.
    """

    def __init__(self, model: Any, kernels: Mapping[torch.device, ProvenAttention], context_tokens: int) -> None:
        self._configs = configs_of(model)
        self.kernels = kernels
        self._context_tokens = context_tokens
        self._cache: RowsCache | None = None
        self._terms: dict[int, AttentionTerms] = {}
        self._windows: list[int] = []
        self._masks: list[torch.Tensor] = []
        self._seen = dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]]()

    @contextmanager
    def over(self, cache: RowsCache) -> Iterator[None]:
        """Within it the model attends over this cache."""
        self._cache, self._masks, self._seen = cache, [], {}
        cache.window_of = self._window_of
        try:
            with attending_by(self, self._configs):
                yield
        finally:
            cache.window_of = None
            self._cache = None

    def mask(self, mask_function: Callable[..., Any]) -> torch.Tensor:
        """Stands for the mask that the library would build by this rule; its content means nothing.

        Raises:
            LookupError: the rule is not that of a window.
        """
        number = len(self._masks)
        if number == len(self._windows):
            self._windows.append(window_of(mask_function, self._context_tokens))
        self._masks.append(stays(torch.zeros(1, 1, 1, 1)))
        return self._masks[-1]

    def attend(
        self,
        module: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """[B, heads, T, dim] -> [B, T, heads, value_dim]: one sequence, or one token of each.

        Raises:
            LookupError: this module's attention is of a kind that is not known here.
        """
        assert self._cache is not None
        terms = self._terms.get(id(module))
        if terms is None:
            terms = self._terms[id(module)] = self._terms_of(keys, mask, options)
        if self._cache.gathers:
            return self._over_all(queries, keys, values, terms)
        layer = self._cache.offered.take(keys)
        if layer.window and terms.window not in (0, layer.window):
            raise LookupError("its window is not its cache's")
        shape = queries.shape[0], queries.shape[2], queries.shape[1], -1
        queries, keys, values = (each.transpose(1, 2).flatten(0, 1) for each in (queries, keys, values))
        kernel = self.kernels.get(queries.device)
        if kernel is None:
            layer.store(keys, values)
            seen = self._seen_of(self._cache.pages * PAGE_TOKENS, layer.held, terms.window)
            return _attended(layer, self._cache.pages, terms, queries, *seen).view(shape)
        are_stored = layer.rows > 1  # tokens of one sequence see each other
        if are_stored:
            layer.store(keys, values)
        found = kernel.attend(layer.table, terms, queries, keys, values, layer.held, are_stored=are_stored)
        return found.view(shape)

    def _over_all(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """Of a single token, over all that a layer's pages hold."""
        assert self._cache is not None
        if terms.sinks is not None or terms.softcap:
            raise LookupError("it attends to nothing, or has a limit")
        seen, _ = self._seen_of(keys.shape[2], self._cache.held_on(keys.device), terms.window)
        is_grouped = queries.shape[1] != keys.shape[1]
        found = scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen[:, None, None], scale=terms.scale, enable_gqa=is_grouped
        )
        return found.transpose(1, 2)

    def _seen_of(self, tokens: int, held: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, tokens]: what those behind `held` [rows] others see of so many, and what they do not; the same for all
        layers of a step."""
        if (held.device, window) not in self._seen:
            places = torch.arange(tokens, device=held.device)
            seen = places <= held[:, None]
            if window:
                seen &= places > held[:, None] - window
            self._seen[held.device, window] = seen, ~seen
        return self._seen[held.device, window]

    def _terms_of(self, keys: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]) -> AttentionTerms:
        window = self._window_of(mask)
        scaling, sinks = options.get("scaling"), options.get("s_aux")
        return AttentionTerms(
            scale=float(scaling) if scaling is not None else keys.shape[-1] ** -0.5,
            window=window,
            softcap=float(options.get("softcap") or 0),
            sinks=sinks.detach().float().contiguous() if sinks is not None else None,
        )

    def _window_of(self, mask: torch.Tensor | None) -> int:
        window = next((w for m, w in zip(self._masks, self._windows, strict=False) if m is mask), None)
        if window is None:
            raise LookupError("its attention does not get the library's masks")
        return window


def attention_over_pages(model: Any, places: Iterable[torch.device], context_tokens: int) -> TabledAttention:
    """That of a model on these devices: by kernels, if all of them have one."""
    found = {place: attention_of(place) for place in places}
    kernels = {place: kernel for place, kernel in found.items() if kernel is not None}
    return TabledAttention(model, kernels if len(kernels) == len(found) else {}, context_tokens)


def _attended(
    layer: RowsLayer,
    pages: int,
    terms: AttentionTerms,
    queries: torch.Tensor,
    seen: torch.Tensor,
    unseen: torch.Tensor,
) -> torch.Tensor:
    """[rows, heads, dim] of tokens that are in their pages -> [rows, heads, value_dim]."""
    keys, values = gathered_pages(layer.paged, layer.pages(pages), queries.dtype)
    # What nobody sees may be anything, also no number, which a share of zero would not take away.
    keys, values = (part.masked_fill(unseen[:, None, :, None], 0) for part in (keys, values))
    is_grouped = queries.shape[1] != keys.shape[1]
    if terms.sinks is None and not terms.softcap:
        mask = seen[:, None, None]
        found = scaled_dot_product_attention(
            queries[:, :, None], keys, values, attn_mask=mask, scale=terms.scale, enable_gqa=is_grouped
        )
        return found[:, :, 0]
    grouped = queries.float().view(layer.rows, keys.shape[1], -1, queries.shape[2])  # [rows, kv_heads, group, dim]
    scores = terms.scale * (grouped @ keys.float().transpose(2, 3))
    if terms.softcap:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
    if terms.sinks is not None:  # attending to nothing
        sinks = terms.sinks.view(1, *grouped.shape[1:3], 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), 3)
    shares = scores.softmax(3)[..., : keys.shape[2]]
    return (shares @ values.float()).flatten(1, 2).to(queries.dtype)
