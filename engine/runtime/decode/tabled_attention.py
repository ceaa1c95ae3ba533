"""The library's attention modules over tables of a card: registered under our own name with its attention interface.

The library's masks are not built.  What a token sees follows from the rule by which a mask would be, which is looked at
when a step is computed for the first time; later steps ask for the same masks in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.kernels.gpu.attention_proof import ProvenAttention, attention_of
from engine.kernels.native.paged_attention import AttentionTerms
from engine.runtime.decoder_layers import stays
from engine.runtime.kv.tabled import TabledCache
from engine.runtime.kv.window_masks import attending_by, configs_of, window_of

IMPLEMENTATION = "switchyard_tabled"


class TabledAttention:
    """Attention of a model's steps over tables.

    Args:
        model: from transformers.
        kernels: of the cards that have layers.
        context_tokens: longest context: a window that is not shorter hides nothing.
    """

    def __init__(self, model: Any, kernels: Mapping[torch.device, ProvenAttention], context_tokens: int) -> None:
        self._configs = configs_of(model)
        self._kernels = kernels
        self._context_tokens = context_tokens
        self._cache: TabledCache | None = None
        self._terms: dict[int, AttentionTerms] = {}
        self._windows: list[int] = []
        self._masks: list[torch.Tensor] = []

    @contextmanager
    def over(self, cache: TabledCache) -> Iterator[None]:
        """Within it the model attends over this cache."""
        self._cache, self._masks = cache, []
        cache.window_of = self._window_of
        _active.append(self)
        try:
            with attending_by(IMPLEMENTATION, self._configs):
                yield
        finally:
            _active.pop()
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
        """[1, heads, 1, dim] -> [1, 1, heads, value_dim].

        Raises:
            LookupError: this module's attention is of a kind that is not known here.
        """
        assert self._cache is not None
        table = self._cache.offered.take(keys)
        terms = self._terms.get(id(module))
        if terms is None:
            terms = self._terms[id(module)] = self._terms_of(keys, mask, options)
        if table.ring and terms.window not in (0, table.ring):
            raise LookupError("its window is not its cache's")
        queries, keys, values = (each[:, :, 0] for each in (queries, keys, values))
        place = queries.device
        held = self._cache.held_on(place)
        return self._kernels[place].attend(table, terms, queries, keys, values, held)[:, None]

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


def tabled_attention(model: Any, places: Iterable[torch.device], context_tokens: int) -> TabledAttention | None:
    """That of a model on these devices; `None` where no kernel computes attention on one of them."""
    kernels = {}
    for place in places:
        kernel = attention_of(place)
        if kernel is None:
            return None
        kernels[place] = kernel
    return TabledAttention(model, kernels, context_tokens)


_active: list[TabledAttention] = []
"""Of the step that is being computed; one at most, because a single thread computes."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return _active[-1].attend(module, query, key, value, attention_mask, options), None


def _mask(*_args: Any, mask_function: Callable[..., Any], **_options: Any) -> torch.Tensor:
    return _active[-1].mask(mask_function)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)
