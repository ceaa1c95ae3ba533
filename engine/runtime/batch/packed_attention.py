"""The library's attention modules over pages: registered under a name of ours with its attention interface.

All rows of a micro-batch go through a module as one sequence; the function that the module calls to attend is told
apart by it whose tokens are whose.  The library's masks are not made: what a token sees is known from its row and from
the module's window.  That window is read from the rule by which the library would make the module's mask, as the mask
alone is what counts there: some modules never pass their window on, others pass one that their mask does not have.
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
from engine.kernels.reference import attend_in_torch
from engine.runtime.kv.window_masks import attending_by, window_of

IMPLEMENTATION = "switchyard_paged"


class PagedStates:
    """The pages of every attention module of a model.

    Args:
        kernels: the native ones; without them torch computes.
        context_tokens: no row is longer.
        window, kept: see `BatchPolicy`.
    """

    def __init__(self, kernels: NativeKernels | None, context_tokens: int, window: int = 0, kept: int = 0) -> None:
        self._kernels = kernels
        self._context_tokens = context_tokens
        self._window, self._kept = window, kept
        self.shapes: dict[int, KvShape] = {}
        self._terms: dict[int, AttentionTerms] = {}
        self._layers: dict[int, tuple[PagedLayer, PagedLayerStruct]] = {}
        self.are_met = False
        """Whether every module has been seen with one token, so that it is known how it attends."""
        self.pieces: Pieces | None = None
        """The rows whose tokens come next, once the modules have been met."""
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

    def mask(self, mask_function: Callable[..., Any]) -> torch.Tensor | None:
        """What modules get in place of a mask that would be made by this rule of the library's.

        Returns:
            While modules are being met, their window [1, 1, 1, 1], 0 without one; afterwards none is needed.

        Raises:
            LookupError: the rule says something else than a window does.
        """
        if self.are_met:
            return None
        return torch.tensor([[[[window_of(mask_function, self._context_tokens)]]]])

    def attend(
        self,
        module: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """[1, heads, T, dim] of all rows, one after the other -> [1, T, heads, value_dim].

        Of a model on a card queries, keys and values come to RAM, where the pages are, and only hidden states go back
        (MoE-Lightning, section 4.1: that is less than the keys and values that a card would have to be sent).
        """
        if self.elsewhere is not None:
            return self.elsewhere(module, queries, keys, values)
        device = queries.device
        queries, keys, values = (_by_token(states.cpu()) for states in (queries, keys, values))
        if not self.are_met:
            self._meet(module, queries, keys, values, mask, options)
            group = queries.shape[1] // keys.shape[1]
            return values.repeat_interleave(group, 1)[None].to(device)
        assert self.pieces is not None
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
        self,
        module: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """One token's states, of a module that is met for the first time: it sees itself alone."""
        if mask is None:
            raise LookupError("its attention is not given the library's masks")
        shape = KvShape(queries.shape[1], keys.shape[1], keys.shape[2], values.shape[2])
        sinks = options.get("s_aux")
        window = int(mask)
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
    """Within it the modules of these configurations attend over pages, without masks once they have been met."""
    _active.append(states)
    try:
        with attending_by(IMPLEMENTATION, configs):
            yield
    finally:
        _active.pop()


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
    attention_mask: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return _active[-1].attend(module, query, key, value, attention_mask, options).to(query.dtype), None


def _mask(*_args: Any, mask_function: Callable[..., Any], **_options: Any) -> torch.Tensor | None:
    return _active[-1].mask(mask_function)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)
