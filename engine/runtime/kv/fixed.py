"""A KV cache whose tensors stay where they are from step to step, over the buffers of the one that grows.

A step that is repeated as a graph writes its keys and values to a row that a tensor names, and attends to a fixed
number of rows, of which a mask hides those that are not there yet (as transformers' static caches do).  What the layers
hold is the growing cache's: any step may as well be computed the ordinary way.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer

ROWS_STEP = 256
"""Rows that steps attend to are a multiple of this: few steps have to be captured again, few rows are wasted."""


class FixedPosition:
    """Where the next token goes, on the device, and on others that have layers.

    Attributes:
        rows: int64 [1]; `ids`: [1, 1], the same for the model; `length`: [], the same as the library asks for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.zeros(1, dtype=torch.int64, device=device)
        self.ids = self.rows.view(1, 1)
        self.length = self.rows[0]
        self._elsewhere: dict[torch.device, FixedPosition] = {}

    def on(self, device: torch.device) -> FixedPosition:
        """The same on another device."""
        if device == self.rows.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = there = FixedPosition(device)
            there.rows.copy_(self.rows)
        return self._elsewhere[device]

    def set(self, tokens: int) -> None:
        """So many tokens come before."""
        self.rows.fill_(tokens)
        for there in self._elsewhere.values():
            there.rows.fill_(tokens)


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """The first `rows` rows of a growing layer's buffers."""

    is_compileable = True  # what the library calls a layer whose masks are to be made on the device
    is_sliding = False

    def __init__(self, layer: GrowingLayer, rows: int, position: FixedPosition) -> None:
        super().__init__()
        buffers = layer.room_for(rows)
        assert buffers is not None
        self._layer, self._rows, self._position = layer, rows, position
        self._here = position.on(buffers[0].device)
        self._buffers = buffers
        self.keys, self.values = (buffer.narrow(-2, 0, rows) for buffer in buffers)
        for buffer in (self.keys, self.values):
            # Hidden rows are multiplied by 0: they must not be NaN.
            held = layer.get_seq_length()
            buffer.narrow(-2, held, rows - held).zero_()
        self.is_initialized = True

    def is_current(self, held: int) -> bool:
        """Whether the growing layer still has these buffers, and holds so much."""
        buffers = self._layer.room_for(0)
        if self._layer.get_seq_length() != held:
            return False
        return buffers is not None and buffers[0] is self._buffers[0] and buffers[1] is self._buffers[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """It is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the states of one token, [1, H, 1, D]; returns all rows, the hidden ones among them."""
        self.keys.index_copy_(-2, self._here.rows, key_states)
        self.values.index_copy_(-2, self._here.rows, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - the library's signature
        """(rows, which token the first of them is)."""
        return self._rows, 0

    def get_seq_length(self) -> Any:
        """Tokens before this one, as a tensor."""
        return self._position.length

    def get_max_length(self) -> int:
        """Rows."""
        return self._rows

    def stepped(self, tokens: int) -> None:
        """After a step: the growing layer holds so many tokens now."""
        self._layer.wrote(tokens)


class FixedWindowLayer(CacheLayerMixin):  # type: ignore[misc]
    """A ring of as many rows as a sliding window has tokens: attention does not ask in which order they come.

    While steps are repeated the ring is what counts; `leave` gives the growing layer its window back, in order.
    """

    is_compileable = True
    is_sliding = True

    def __init__(self, layer: GrowingWindowLayer, position: FixedPosition) -> None:
        super().__init__()
        self._layer, self._window = layer, layer.sliding_window
        held, tokens = layer.keys.shape[-2], layer.cumulative_length
        self._position, self._here = position, position.on(layer.keys.device)
        self._row = torch.zeros_like(self._here.rows)
        rows = torch.arange(tokens - held, tokens, device=layer.keys.device) % self._window
        self.keys, self.values = (self._ring(states, rows) for states in (layer.keys, layer.values))
        self._tokens = tokens
        self.is_initialized = True

    def _ring(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ring = states.new_zeros((*states.shape[:-2], self._window, states.shape[-1]))
        return ring.index_copy_(-2, rows, states)

    def is_current(self, held: int) -> bool:
        """Whether the layer is unchanged since: it has seen so many tokens."""
        return bool(self._layer.cumulative_length == self._tokens == held)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """It is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the states of one token over the oldest one's; returns the whole ring."""
        self._row.copy_(self._here.rows).remainder_(self._window)
        self.keys.index_copy_(-2, self._row, key_states)
        self.values.index_copy_(-2, self._row, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """(rows, 0): to a mask the ring is a context of the window's length, full once it has gone round."""
        return self._window, 0

    def get_seq_length(self) -> Any:
        """Tokens before this one that the mask is to know of, as a tensor."""
        return torch.clamp(self._position.length, max=self._window - 1)

    def get_max_length(self) -> int:
        """Rows."""
        return int(self._window)

    def stepped(self, tokens: int) -> None:
        """After a step: so many tokens have come."""
        self._tokens = tokens
        self._layer.cumulative_length = tokens

    def leave(self) -> None:
        """Gives the growing layer its window: the last tokens, in order."""
        left = min(self._tokens, self._window - 1)
        rows = torch.arange(self._tokens - left, self._tokens, device=self.keys.device) % self._window
        self._layer.keys = self.keys.index_select(-2, rows)
        self._layer.values = self.values.index_select(-2, rows)


def is_one_window(layer: GrowingWindowLayer) -> bool:
    """Whether it holds a single sequence, and no more than its window."""
    return bool(layer.is_initialized and not layer.record_past and layer.keys.dim() == 4 and layer.keys.shape[0] == 1)


class FixedCache(Cache):  # type: ignore[misc]
    """All layers of a growing cache, with room for `rows` tokens."""

    def __init__(self, layers: list[Any], position: FixedPosition, rows: int) -> None:
        super().__init__(layers=layers)
        self.rows = rows
        self.is_warm = False
        """Whether a step has been computed with it."""
        self._position = position

    @classmethod
    def over(cls, cache: Cache, tokens: int, position: FixedPosition) -> FixedCache | str:
        """With room for at least `tokens`, or why that is not possible."""
        growing = [layer for layer in cache.layers if type(layer) is GrowingLayer]
        buffers = [layer.room_for(tokens) for layer in growing]
        if None in buffers:
            return "a cache without keys, or of several sequences"
        # One mask serves all layers, so all have as many rows; where there are windows alone, no length is too much.
        capacities = [pair[0].shape[-2] for pair in buffers if pair is not None]
        rows = min(-(-tokens // ROWS_STEP) * ROWS_STEP, *capacities) if capacities else sys.maxsize
        layers: list[Any] = []
        for layer in cache.layers:
            if type(layer) is GrowingLayer:
                layers.append(FixedLayer(layer, rows, position))
            elif type(layer) is GrowingWindowLayer and is_one_window(layer):
                layers.append(FixedWindowLayer(layer, position))
            elif type(layer) is DummyLayer:
                layers.append(layer)
            else:
                return f"a cache of {type(layer).__name__}"
        return cls(layers, position, rows)

    @staticmethod
    def bytes_beside(cache: Cache) -> int:
        """Memory that one over this cache takes besides the cache's own."""
        return sum(
            layer.sliding_window * states.shape[1] * states.shape[-1] * states.element_size()
            for layer in cache.layers
            if type(layer) is GrowingWindowLayer and is_one_window(layer)
            for states in (layer.keys, layer.values)
        )

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Tokens before this one, as masks are to know of it: a window's ring has an end."""
        return self.layers[layer_idx].get_seq_length()

    def get_seq_length(self, layer_idx: int = 0) -> Any:  # noqa: ARG002
        """Tokens before this one."""
        return self._position.length

    def holds(self, held: int, tokens: int) -> bool:
        """Whether it is still what the growing cache has, which holds `held`, and there is room for so many tokens."""
        return tokens <= self.rows and all(layer.is_current(held) for layer in self._own())

    def stepped(self, tokens: int) -> None:
        """After a step: the growing cache holds so many tokens."""
        for layer in self._own():
            layer.stepped(tokens)

    def leave(self) -> bool:
        """Gives all back to the growing cache, which others are going to use.

        Returns:
            Whether it is of no use any more: what the others do would be missing in its windows.
        """
        windows = [layer for layer in self.layers if isinstance(layer, FixedWindowLayer)]
        for layer in windows:
            layer.leave()
        return bool(windows)

    def _own(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, FixedLayer | FixedWindowLayer)]
