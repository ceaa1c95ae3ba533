"""A KV cache for steps that are repeated as graphs and attend by a card's kernel: it reads from tables where keys lie.

Neither the length of the context nor where its buffers are is part of such a graph: when they grow, tables change, and
the graph stays.  The kernel stores the token's own keys and values, so `update` hands them on as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from engine.kernels.gpu.latents import LatentContext
from engine.kernels.gpu.pages import PageTable
from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType
from engine.runtime.kv.fixed import FixedCache, FixedPosition, FixedWindowLayer, is_one_window
from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.narrow import NarrowLayer

_TYPES = {kv_type.dtype: kv_type for kv_type in KvType}
_GROWTH = 8
"""Without a longest context, tables have room for so many times what there is."""


class Offered:
    """The token's own keys as a layer handed them on last, and the table that they belong to."""

    def __init__(self) -> None:
        self._keys: torch.Tensor | None = None
        self._table: PageTable | None = None

    def put(self, keys: torch.Tensor, table: PageTable) -> None:
        """A layer hands on these keys."""
        self._keys, self._table = keys, table

    def take(self, keys: torch.Tensor) -> PageTable:
        """The table of these keys.

        Raises:
            LookupError: they are not what a layer handed on last.
        """
        if self._table is None or self._keys is not keys:
            raise LookupError("its attention does not get its layer's keys")
        return self._table


def _table_tokens(layer: GrowingLayer | NarrowLayer) -> int:
    held = layer.get_seq_length()
    return max(held + 1, layer.most_tokens or _GROWTH * max(held, PAGE_TOKENS))


class TabledLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """The buffers of a growing layer, by a table."""

    is_compileable = True
    is_sliding = False

    def __init__(self, layer: GrowingLayer | NarrowLayer, position: FixedPosition, offered: Offered) -> None:
        super().__init__()
        parts = layer.room_for(layer.get_seq_length())
        assert parts is not None
        pages = -(-_table_tokens(layer) // PAGE_TOKENS) + 1
        self.table = PageTable(_TYPES[parts[0].dtype], 1, pages, parts[0].device)
        self._layer, self._position, self._offered = layer, position, offered
        self._parts: tuple[torch.Tensor, ...] = ()
        self.is_initialized = True

    def is_current(self, held: int) -> bool:
        """Whether the growing layer holds so much; if so, there is room for one more, wherever it is then."""
        parts = self._layer.room_for(held + 1)
        if parts is None or self._layer.get_seq_length() != held:
            return False
        if len(parts) != len(self._parts) or any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            self._parts = parts
            # A buffer that doubled may have more room than the context will ever take.
            rows = min(parts[0].shape[-2], self.table.tokens)
            self.table.set_rows(0, [part[0].narrow(1, 0, rows) for part in parts])
        return True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """It is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands on the states of one token, [1, H, 1, D]."""
        self._offered.put(key_states, self.table)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows, which token the first of them is): no mask is made of it."""
        return query_length, 0

    def get_seq_length(self) -> Any:
        """Tokens before this one, as a tensor."""
        return self._position.length

    def get_max_length(self) -> int:
        """Rows."""
        return self.table.tokens

    def stepped(self, tokens: int) -> None:
        """After a step: the growing layer holds so many tokens now."""
        self._layer.wrote(tokens)


class TabledWindowLayer(FixedWindowLayer):
    """A ring, by a table."""

    def __init__(self, layer: GrowingWindowLayer, position: FixedPosition, offered: Offered) -> None:
        super().__init__(layer, position)
        rows = self.get_max_length()
        self.table = PageTable(_TYPES[self.keys.dtype], 1, -(-rows // PAGE_TOKENS), self.keys.device, ring=rows)
        self.table.set_rows(0, [self.keys[0], self.values[0]])
        self._offered = offered

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands on the states of one token."""
        self._offered.put(key_states, self.table)
        return key_states, value_states


class TabledCache(FixedCache):
    """All layers of a growing cache, by tables."""

    def __init__(self, layers: list[Any], position: FixedPosition, rows: int, offered: Offered) -> None:
        super().__init__(layers, position, rows)
        self.offered = offered
        self.window_of: Callable[[torch.Tensor | None], int] | None = None
        """A mask's, while a step attends over this cache."""

    def held_on(self, device: torch.device) -> torch.Tensor:
        """Tokens before the next one, int64 [1], on a device that has layers."""
        return self._position.on(device).rows

    def latents(self, layer: int, mask: torch.Tensor | None) -> LatentContext:
        """Of a layer that keeps latents.

        Raises:
            LookupError: the mask is not one of the step's, or the layer keeps none.
        """
        at = self.layers[layer]
        if self.window_of is None or not isinstance(at, TabledLayer | TabledWindowLayer):
            raise LookupError("its layer has no table")
        window = self.window_of(mask)
        if at.table.ring and window not in (0, at.table.ring):
            raise LookupError("its window is not its cache's")
        return LatentContext(at.table, self.held_on(at.table.entries.device), window)

    @classmethod
    def over(cls, cache: Cache, tokens: int, position: FixedPosition) -> TabledCache | str:
        """Of a cache that holds `tokens` less one, or why that is not possible."""
        offered, layers = Offered(), list[Any]()
        for layer in cache.layers:
            if type(layer) in (GrowingLayer, NarrowLayer) and layer.can_claim(1):
                layers.append(TabledLayer(layer, position, offered))
            elif type(layer) is GrowingWindowLayer and is_one_window(layer):
                layers.append(TabledWindowLayer(layer, position, offered))
            elif type(layer) is DummyLayer:
                layers.append(layer)
            else:
                return f"a cache of {type(layer).__name__}"
        tables = [layer.table.tokens for layer in layers if isinstance(layer, TabledLayer)]
        made = cls(layers, position, min(tables, default=sys.maxsize), offered)
        return made if made.holds(tokens - 1, tokens) else "a cache whose layers hold different numbers of tokens"

    def _own(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, TabledLayer | TabledWindowLayer)]

    @staticmethod
    def bytes_beside(cache: Cache) -> int:
        """Rings and tables."""
        growing = (layer for layer in cache.layers if type(layer) in (GrowingLayer, NarrowLayer))
        entries = sum(4 * (2 + _table_tokens(layer) // PAGE_TOKENS) for layer in growing)
        return FixedCache.bytes_beside(cache) + 8 * entries
