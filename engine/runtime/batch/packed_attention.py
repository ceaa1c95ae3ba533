"""The library's attention modules over pages.

All rows of a micro-batch pass through a module as one sequence; the function that the module calls for attention
separates the rows' tokens.  The library's masks are not built: what a token attends to follows from its row and from
the module's window.  That window is taken from the rule by which the library would build the module's mask, because
only the mask is reliable: some modules never pass their window on, others pass one that their mask does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

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
from engine.runtime.kv.library_attention import window_of
from engine.runtime.kv.paged_cache import PagedCaches


class PagedStates:
    """The pages of every attention module of a model.

    Args:
        kernels: the native ones; without them torch computes.
        context_tokens: longest row.
        window, kept: see `BatchPolicy`.
    """

    def __init__(self, kernels: NativeKernels | None, context_tokens: int, window: int = 0, kept: int = 0) -> None:
        self._kernels = kernels
        self._context_tokens = context_tokens
        self._window, self._kept = window, kept
        self.shapes: dict[int, KvShape] = {}
        self._terms: dict[int, AttentionTerms] = {}
        self._layers: dict[int, tuple[PagedLayer, PagedLayerStruct]] = {}
        self._latent: set[int] = set()
        self.slides = False
        """Whether modules with a window have pages of their own."""
        self.are_met = False
        """Whether every module has been probed with one token, so that its kind of attention is known."""
        self.pieces: Pieces | None = None
        """The rows whose tokens come next, once the modules have been probed."""
        self.elsewhere: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """If set, computes attention instead of `attend`, from a module, queries, keys and values."""

    def allocate(self, kv_type: KvType, pages: int, windows: int = 0, *, by_head: bool = False) -> None:
        """Allocates the pages of all modules probed so far; `by_head` is read faster in single sequences.

        Args:
            windows: pages of modules with a window; 0 if theirs are those of the others.
        """
        self.slides = windows > 0
        for key, shape in self.shapes.items():
            own = windows or pages if self._terms[key].window else pages
            layer = PagedLayer(shape, self._type_of(key, kv_type), own, by_head=by_head)
            self._layers[key] = (layer, layer.struct(self._terms[key]))

    def attend_over(self, caches: PagedCaches) -> bool:
        """Whether modules can attend over the pages of a cache's layers from now on: each has those of its own."""
        layers = [
            (paged, window)
            for paged, window in zip(caches.layers, caches.windows, strict=True)
            if isinstance(paged, PagedLayer)
        ]
        if len(layers) != len(self.shapes):
            return False
        found = dict[int, tuple[PagedLayer, PagedLayerStruct]]()
        for (key, shape), (paged, window) in zip(self.shapes.items(), layers, strict=True):
            terms = self._terms[key]
            if replace(shape, heads=paged.shape.heads) != paged.shape or terms.window != window:
                return False
            own = copy(paged)
            own.shape = shape
            found[key] = own, own.struct(terms)
        self._layers = found
        return True

    def discard(self, pages: Sequence[int]) -> None:
        """Returns the memory of these pages to the system, as far as it takes it."""
        for key, (layer, _struct) in self._layers.items():
            if not (self.slides and self._terms[key].window):
                layer.discard(pages)

    def discard_windows(self, pages: Sequence[int]) -> None:
        """The same of windows' pages."""
        for key, (layer, _struct) in self._layers.items():
            if self.slides and self._terms[key].window:
                layer.discard(pages)

    def bytes_by_window(self, kv_type: KvType) -> dict[int, int]:
        """Of a page of all modules that have the same window; 0 stands for none."""
        found = dict[int, int]()
        for key, shape in self.shapes.items():
            window = self._terms[key].window
            found[window] = found.get(window, 0) + shape.page_bytes(self._type_of(key, kv_type))
        return found

    def keep_latents(self, module: Any, rank: int, rope: int) -> None:
        """The pages of this module hold latents and rotary keys, in bf16, in the place of what they expand to."""
        self.shapes[id(module)] = KvShape(1, 1, rank, rope)
        self._latent.add(id(module))

    def _type_of(self, key: int, kv_type: KvType) -> KvType:
        return KvType.BF16 if key in self._latent else kv_type

    @property
    def layers(self) -> list[tuple[PagedLayer, PagedLayerStruct]]:
        """The pages of all modules, in the order in which they were probed."""
        return list(self._layers.values())

    def terms_of(self, module: Any) -> AttentionTerms:
        """The attention parameters of this module."""
        return self._terms[id(module)]

    def layer_of(self, module: Any) -> tuple[PagedLayer, PagedLayerStruct]:
        """The pages of this module."""
        return self._layers[id(module)]

    def mask(self, mask_function: Callable[..., Any]) -> torch.Tensor | None:
        """What modules get instead of a mask that the library would build by this rule.

        Returns:
            While modules are probed, their window [1, 1, 1, 1], 0 without one; afterwards None.

        Raises:
            LookupError: the rule is not that of a window.
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

        For a model on a card, queries, keys and values are copied to RAM, where the pages are, and only hidden states
        go back (MoE-Lightning, section 4.1: this is less than sending the cached keys and values to the card).
        """
        if self.elsewhere is not None:
            return self.elsewhere(module, queries, keys, values)
        device = queries.device
        queries, keys, values = (_by_token(states.cpu()) for states in (queries, keys, values))
        if not self.are_met:
            self._probe(module, queries, keys, values, mask, options)
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

    def _probe(
        self,
        module: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """One token's states, of a module that is probed for the first time: the token attends only to itself."""
        if mask is None:
            raise LookupError("its attention does not get the library's masks")
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


def _by_token(states: torch.Tensor) -> torch.Tensor:
    tokens = states[0].transpose(0, 1)
    if tokens.dtype not in (torch.bfloat16, torch.float32):
        tokens = tokens.float()
    return tokens if tokens.stride(2) == 1 else tokens.contiguous()
