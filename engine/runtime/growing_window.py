"""A sliding window of keys and values to which a single token is added in place."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from engine.runtime.cache_capacity import grown_capacity


class GrowingWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]  # transformers is untyped
    """The library's layer, besides `claim_row`.

    `keys` and `values` are views of a buffer with room behind them as long as nobody has put others in their place:
    that is how the library's own methods, which all do so, need not know of it.
    """

    keys: Any
    values: Any

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self._start = 0
        self._key_buffer: torch.Tensor | None = None
        self._value_buffer: torch.Tensor | None = None
        self._shown: tuple[Any, Any] = (None, None)

    def claim_row(self) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """One more token whose states the caller writes itself, into row n of the tensors returned.

        Returns:
            Keys and values [1, H, n + 1 or more, D], dense but for dimension 1, and n, the tokens of the window before
            this one; `None` if the layer is empty, holds several sequences or is to remember what slides out.
        """
        if not self.is_initialized or self.record_past or self.keys.dim() != 4 or self.keys.shape[0] != 1:
            return None
        held = self.keys.shape[-2]
        keys, values = self._key_buffer, self._value_buffer
        moved = self._shown[0] is not self.keys or self._shown[1] is not self.values
        if keys is None or values is None or moved or self._start + held == keys.shape[-2]:
            keys, values = self._move(held)
        start = self._start
        left = max(0, held + 1 - (self.sliding_window - 1))  # what slides out once this token is there
        self.keys = keys.narrow(-2, start + left, held + 1 - left)
        self.values = values.narrow(-2, start + left, held + 1 - left)
        self._shown = (self.keys, self.values)
        self._start = start + left
        self.cumulative_length += 1
        return keys.narrow(-2, start, held + 1), values.narrow(-2, start, held + 1), held

    def allocated_bytes(self) -> int:
        """Bytes of what is held, room for coming tokens included."""
        if not self.is_initialized:
            return 0
        is_shown = self._shown[0] is self.keys and self._key_buffer is not None and self._value_buffer is not None
        held = (self._key_buffer, self._value_buffer) if is_shown else (self.keys, self.values)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def _move(self, held: int) -> tuple[torch.Tensor, torch.Tensor]:
        # New buffers rather than the old ones' beginning: somebody may still hold a view of those.
        capacity = grown_capacity(held, held + 1, 2 * self.sliding_window)
        moved = []
        for old in (self.keys, self.values):
            buffer = old.new_empty((*old.shape[:-2], capacity, old.shape[-1]))
            buffer.narrow(-2, 0, held).copy_(old)
            moved.append(buffer)
        self._key_buffer, self._value_buffer = moved
        self._start = 0
        return moved[0], moved[1]
