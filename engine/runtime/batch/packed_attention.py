"""The library's attention modules over pages: registered under a name of ours with its attention interface.

All rows of a micro-batch go through a module as one sequence; the function that the module calls to attend is told
apart by it whose tokens are whose.  The library's masks are not made: what a token sees is known from its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import (
    AttentionTerms,
    KvShape,
    KvType,
    PagedLayer,
    PagedLayerStruct,
    Pieces,
    attend,
)
from engine.kernels.reference_paged import attend_in_torch

IMPLEMENTATION = "switchyard_paged"


class PagedStates:
    """The pages of every attention module of a model.

    Args:
        kernels: the native ones; without them torch computes.
        window, kept: see `BatchPolicy`.
    """

    def __init__(self, kernels: NativeKernels | None, window: int = 0, kept: int = 0) -> None:
        self._kernels = kernels
        self._window, self._kept = window, kept
        self.shapes: dict[int, KvShape] = {}
        self._terms: dict[int, AttentionTerms] = {}
        self._layers: dict[int, tuple[PagedLayer, PagedLayerStruct]] = {}
        self.pieces: Pieces | None = None
        """The rows whose tokens come next; `None` while the modules are still being met."""
        self.elsewhere: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Attends in place of this, if set: it takes a module, queries, keys and values as `attend` does."""

    def allocate(self, kv_type: KvType, pages: int) -> None:
        """Makes the pages of all modules met so far."""
        for key, shape in self.shapes.items():
            layer = PagedLayer(shape, kv_type, pages)
            self._layers[key] = (layer, layer.struct(self._terms[key]))

    def page_bytes(self, kv_type: KvType) -> int:
        """Bytes of one page of all layers."""
        return sum(shape.page_bytes(kv_type) for shape in self.shapes.values())

    def terms_of(self, module: Any) -> AttentionTerms:
        """How this module attends."""
        return self._terms[id(module)]

    def layer_of(self, module: Any) -> tuple[PagedLayer, PagedLayerStruct]:
        """The pages of this module."""
        return self._layers[id(module)]

    def attend(
        self, module: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """[1, heads, T, dim] of all rows, one after the other -> [1, T, heads, value_dim].

        Of a model on a card queries, keys and values come to RAM, where the pages are, and only hidden states go back
        (MoE-Lightning, section 4.1: that is less than the keys and values that a card would have to be sent).
        """
        if self.elsewhere is not None:
            return self.elsewhere(module, queries, keys, values)
        device = queries.device
        queries, keys, values = (_by_token(states.cpu()) for states in (queries, keys, values))
        if self.pieces is None:
            self._meet(module, queries, keys, values, options)
            group = queries.shape[1] // keys.shape[1]
            return values.repeat_interleave(group, 1)[None].to(device)
        attended = self.attend_rows(self._kernels, module, self.pieces, queries, keys, values)
        return attended[None].to(device)

    def attend_rows(
        self,
        kernels: NativeKernels | None,
        module: Any,
        pieces: Pieces,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """[T, heads, dim] of these rows in RAM, bf16 or fp32 -> [T, heads, value_dim]."""
        layer, struct = self._layers[id(module)]
        if kernels is not None:
            return attend(kernels, struct, pieces, queries, keys, values)
        return attend_in_torch(layer, self._terms[id(module)], pieces, queries, keys, values)

    def _meet(
        self, module: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """One token's states, of a module that is met for the first time: it sees itself alone."""
        shape = KvShape(queries.shape[1], keys.shape[1], keys.shape[2], values.shape[2])
        sinks = options.get("s_aux")
        window = int(options.get("sliding_window") or 0)
        if self._window and not 0 < window <= self._window:
            window = self._window
        scaling = options.get("scaling")
        self.shapes[id(module)] = shape
        self._terms[id(module)] = AttentionTerms(
            scale=float(scaling) if scaling is not None else shape.key_dim**-0.5,
            window=window,
            kept=self._kept if window and window == self._window else 0,
            softcap=float(options.get("softcap") or 0),
            sinks=sinks.detach().float().cpu().contiguous() if sinks is not None else None,
        )


_active: list[PagedStates] = []
"""The states of the batch whose layer is being computed: at most one, as one thread computes."""


@contextmanager
def paged(states: PagedStates, configs: list[Any]) -> Iterator[None]:
    """Within it the modules of these configurations attend over pages, and no masks are made for them."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = IMPLEMENTATION
    _active.append(states)
    try:
        yield
    finally:
        _active.pop()
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def configs_of(model: Any) -> list[Any]:
    """Every configuration by which modules of this model choose their attention."""
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def _by_token(states: torch.Tensor) -> torch.Tensor:
    tokens = states[0].transpose(0, 1)
    if tokens.dtype not in (torch.bfloat16, torch.float32):
        tokens = tokens.float()
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,  # noqa: ARG001 - some pass it by name
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return _active[-1].attend(module, query, key, value, options).to(query.dtype), None


def _no_mask(*_args: Any, **_options: Any) -> None:
    return None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _no_mask)
