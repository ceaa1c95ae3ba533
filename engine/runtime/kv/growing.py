"""KV cache layers that write in place: a token costs a row, not a copy of the whole context.

transformers' `DynamicLayer` concatenates at every step, which moves the entire cache for each token.  `GrowingLayer`
holds its keys and values in buffers of doubling capacity and hands out views of them; it is equal in every other way,
so it stands in for plain full-attention layers, `GrowingIndexedLayer` for those that choose tokens by an index,
`GrowingWindowLayer` for sliding windows, and the library's own layers serve all others.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from engine.experts.record import empty_in_huge_pages

_FIRST_CAPACITY = 256


def grown_capacity(held: int, tokens: int, most_tokens: int | None = None) -> int:
    """Tokens that there is room for once a layer that was full with `held` has been made to hold `tokens`."""
    capacity = max(_FIRST_CAPACITY, 2 * held, tokens)
    return capacity if most_tokens is None else max(tokens, min(capacity, most_tokens))


class GrowingWindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]  # transformers is untyped
    """The library's layer, besides `claim_rows` and a `crop` that copies nothing.

    `keys` and `values` are views of a buffer with room behind them as long as they have not been replaced:
    that is how the library's own methods, which all do so, need not know of it.
    """

    keys: Any
    values: Any
    cumulative_length: int

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self._start = 0
        self._key_buffer: torch.Tensor | None = None
        self._value_buffer: torch.Tensor | None = None
        self._shown: tuple[Any, Any] = (None, None)

    def can_claim(self, tokens: int) -> bool:
        """Whether `claim_rows` gives so many: several only as long as they let nothing slide out, which each of them
        would have to see or not."""
        if not self.is_initialized or self.record_past or self.keys.dim() != 4 or self.keys.shape[0] != 1:
            return False
        return tokens == 1 or self.cumulative_length + tokens < self.sliding_window

    def claim_rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """More tokens whose states the caller writes itself, into the rows from n on of the tensors returned.

        Returns:
            Keys and values [1, H, n + tokens or more, D], dense but for dimension 1, and n, the tokens of the window
            before these; `None` if the layer is empty, holds several sequences or is to remember what slides out, or if
            something would slide out between several tokens.
        """
        if not self.can_claim(tokens):
            return None
        held = self.keys.shape[-2]
        keys, values = self._key_buffer, self._value_buffer
        moved = self._shown[0] is not self.keys or self._shown[1] is not self.values
        if keys is None or values is None or moved or self._start + held + tokens > keys.shape[-2]:
            keys, values = self._move(held, tokens)
        start, now = self._start, held + tokens
        left = max(0, now - (self.sliding_window - 1))  # what slides out once they are there
        self._show(keys, values, start + left, now - left)
        self.cumulative_length += tokens
        return keys.narrow(-2, start, now), values.narrow(-2, start, now), held

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens, in place as long as nothing has slid out."""
        keys, values = self._key_buffer, self._value_buffer
        is_shown = self._shown[0] is self.keys and self._shown[1] is self.values
        if keys is None or values is None or not is_shown or self.cumulative_length >= self.sliding_window:
            super().crop(tokens_to_remove)
            return
        self.cumulative_length = max(0, self.cumulative_length + min(0, tokens_to_remove))
        self._show(keys, values, self._start, self.cumulative_length)

    def allocated_bytes(self) -> int:
        """Bytes of what is held, room for coming tokens included."""
        if not self.is_initialized:
            return 0
        is_shown = self._shown[0] is self.keys and self._key_buffer is not None and self._value_buffer is not None
        held = (self._key_buffer, self._value_buffer) if is_shown else (self.keys, self.values)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def _show(self, keys: torch.Tensor, values: torch.Tensor, start: int, tokens: int) -> None:
        """Makes these rows of the buffers the window."""
        self.keys, self.values = keys.narrow(-2, start, tokens), values.narrow(-2, start, tokens)
        self._shown = (self.keys, self.values)
        self._start = start

    def _move(self, held: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        # New buffers rather than the old ones' beginning: other code may still hold a view of those.
        capacity = grown_capacity(held, held + tokens, 2 * self.sliding_window)
        moved = []
        for old in (self.keys, self.values):
            shape = (*old.shape[:-2], capacity, old.shape[-1])
            buffer = empty_in_huge_pages(shape, dtype=old.dtype, device=old.device)
            buffer.narrow(-2, 0, held).copy_(old)
            moved.append(buffer)
        self._key_buffer, self._value_buffer = moved
        self._start = 0
        return moved[0], moved[1]


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """Keys and values [B, H, n, D] as views of buffers [B, H, capacity, D].

    Args:
        most_tokens: capacity never exceeds this unless more tokens do come.
    """

    _is_behind = False
    """Whether rows were claimed since `keys` and `values` were last looked at: claiming code does not look."""

    def __init__(self, most_tokens: int | None = None) -> None:
        super().__init__()
        self.most_tokens = most_tokens
        self._length = 0
        self._key_buffer: torch.Tensor | None = None
        self._value_buffer: torch.Tensor | None = None

    @property
    def keys(self) -> Any:
        """What is held, [B, H, n, D]."""
        self._catch_up()
        return self._keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._catch_up()
        self._keys = keys

    @property
    def values(self) -> Any:
        """What is held, [B, H, n, D]."""
        self._catch_up()
        return self._values

    @values.setter
    def values(self, values: Any) -> None:
        self._catch_up()
        self._values = values

    def _catch_up(self) -> None:
        if self._is_behind:
            self._is_behind = False
            assert self._key_buffer is not None
            assert self._value_buffer is not None
            self._keys = self._key_buffer.narrow(-2, 0, self._length)
            self._values = self._value_buffer.narrow(-2, 0, self._length)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._length = 0
        self._key_buffer = self._value_buffer = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002 - the library's signature
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states [B, H, q, D]; returns all keys and values so far, as views valid until the next call."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self._length
        end = start + key_states.shape[-2]
        keys, values = self._key_buffer, self._value_buffer
        if keys is None or values is None or end > keys.shape[-2]:
            keys, values = self._grow(key_states, value_states, end)
        keys.narrow(-2, start, end - start).copy_(key_states)
        values.narrow(-2, start, end - start).copy_(value_states)
        self._length = end
        self.keys = keys.narrow(-2, 0, end)
        self.values = values.narrow(-2, 0, end)
        return self.keys, self.values

    def room_for(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Buffers [1, H, capacity, D] that hold at least so many tokens, and what they hold so far.

        Returns:
            `None` if the cache is empty or holds several sequences.
        """
        if self._key_buffer is None or self._value_buffer is None or self._key_buffer.shape[0] != 1:
            return None
        if tokens > self._key_buffer.shape[-2]:
            return self._grow(self.keys, self.values, tokens)
        return self._key_buffer, self._value_buffer

    def wrote(self, tokens: int) -> None:
        """Rows have been written into the buffers from outside: they hold so many tokens now."""
        assert self._key_buffer is not None
        assert self._value_buffer is not None
        self._length = tokens
        self.keys = self._key_buffer.narrow(-2, 0, tokens)
        self.values = self._value_buffer.narrow(-2, 0, tokens)

    def can_claim(self, tokens: int) -> bool:  # noqa: ARG002 - any number
        """Whether `claim_rows` gives so many."""
        return self._key_buffer is not None and self._value_buffer is not None and self._key_buffer.shape[0] == 1

    def claim_rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """More tokens whose states the caller writes itself, into the rows from n on of the buffers returned.

        Returns:
            Key and value buffer [1, H, capacity, D] and n, the tokens held before; `None` if the cache is empty or
            holds several sequences.
        """
        if self._key_buffer is None or self._value_buffer is None or self._key_buffer.shape[0] != 1:
            return None
        start = self._length
        if start + tokens > self._key_buffer.shape[-2]:
            self._grow(self.keys, self.values, start + tokens)
        keys, values = self._key_buffer, self._value_buffer
        self._length = start + tokens
        self._is_behind = True
        return keys, values, start

    def _grow(
        self, key_states: torch.Tensor, value_states: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        capacity = grown_capacity(self._length, tokens, self.most_tokens)
        grown = []
        for old, new in ((self._key_buffer, key_states), (self._value_buffer, value_states)):
            shape = (*new.shape[:-2], capacity, new.shape[-1])
            buffer = empty_in_huge_pages(shape, dtype=new.dtype, device=new.device)
            if old is not None and self._length:
                buffer.narrow(-2, 0, self._length).copy_(old.narrow(-2, 0, self._length))
            grown.append(buffer)
        self._key_buffer, self._value_buffer = grown
        return grown[0], grown[1]

    def _show(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes these the buffers, full to the brim."""
        self._key_buffer = self.keys = keys
        self._value_buffer = self.values = values
        self._length = keys.shape[-2]

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens: nothing is copied."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}, but must be 0 or negative.")
        if self._key_buffer is None or self._value_buffer is None:
            return
        self._length = max(0, self._length + tokens_to_remove)
        self.keys = self._key_buffer.narrow(-2, 0, self._length)
        self.values = self._value_buffer.narrow(-2, 0, self._length)

    def reset(self) -> None:
        """Forgets everything and frees the buffers."""
        super().reset()
        self._is_behind = False
        self._length = 0
        self._key_buffer = self._value_buffer = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; `beam_idx` may be longer than the batch, which widens it."""
        if self._length == 0 or self._key_buffer is None or self._value_buffer is None:
            return
        beam_idx = beam_idx.to(self.keys.device)
        if beam_idx.shape[0] != self.keys.shape[0]:
            self._show(self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx))
            return
        # Most beams continue themselves: only the rows that change hands are copied, and the spare capacity stays.
        rows = (beam_idx != torch.arange(beam_idx.shape[0], device=beam_idx.device)).nonzero().squeeze(-1)
        if rows.numel():
            sources = beam_idx[rows]
            self.keys[rows] = self.keys.index_select(0, sources)
            self.values[rows] = self.values.index_select(0, sources)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self._length:
            self._show(self.keys.repeat_interleave(repeats, dim=0), self.values.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows."""
        if self._length:
            self._show(self.keys[indices, ...], self.values[indices, ...])

    def offload(self) -> None:
        """Not for this layer: its buffers stay where they were made."""
        raise NotImplementedError("A growing layer is not offloaded.")

    def prefetch(self) -> None:
        """Nothing is ever offloaded."""

    def allocated_bytes(self) -> int:
        """Bytes of both buffers, spare capacity included."""
        return sum(b.numel() * b.element_size() for b in (self._key_buffer, self._value_buffer) if b is not None)


class GrowingIndexedLayer(GrowingLayer):
    """As the library's `DynamicIndexedLayer`: beside keys and values what an index of important tokens is looked up by.

    Attributes:
        indexer_position_ids: [axes, B, n] positions that the model may keep here; `None` if it does not.
    """

    def __init__(self, most_tokens: int | None = None) -> None:
        super().__init__(most_tokens)
        self.indexer_position_ids: torch.Tensor | None = None
        self._index_buffer: torch.Tensor | None = None
        self._indexed = 0

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether this layer has an index of its own."""
        return self._index_buffer is not None

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """[B, n, D], a view; `None` without an index."""
        return None if self._index_buffer is None else self._index_buffer.narrow(1, 0, self._indexed)

    @property
    def index_rows(self) -> torch.Tensor | None:
        """What `indexer_keys` is a view of, [B, capacity, D]: with room for what was claimed."""
        return self._index_buffer

    def can_claim(self, tokens: int) -> bool:
        """See `GrowingLayer`; the index, if there is one, knows all tokens."""
        return super().can_claim(tokens) and (self._index_buffer is None or self._indexed == self._length)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Appends [B, q, D]; returns all of them so far, as a view valid until the next call."""
        start, end = self._indexed, self._indexed + indexer_key_states.shape[1]
        buffer = self._index_buffer
        if buffer is None or end > buffer.shape[1]:
            buffer = self._grow_index(indexer_key_states, end)
        buffer.narrow(1, start, end - start).copy_(indexer_key_states)
        self._indexed = end
        return buffer.narrow(1, 0, end)

    def update_index(self, states: torch.Tensor) -> torch.Tensor:
        """The same of [B, 1, q, D], as MiniMax-M3 calls it."""
        return self.update_indexer(states[:, 0])[:, None]

    def _grow_index(self, like: torch.Tensor, tokens: int) -> torch.Tensor:
        old, capacity = self._index_buffer, grown_capacity(self._indexed, tokens, self.most_tokens)
        shape = (like.shape[0], capacity, like.shape[2])
        # As keys are held, if there are any: the library may have rotated these in float32.
        dtype = like.dtype if self._key_buffer is None else self._key_buffer.dtype
        buffer = empty_in_huge_pages(shape, dtype=dtype, device=like.device)
        if old is not None and self._indexed:
            buffer.narrow(1, 0, self._indexed).copy_(old.narrow(1, 0, self._indexed))
        self._index_buffer = buffer
        return buffer

    def claim_rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """See `GrowingLayer`; the rows of the index, and the positions, are the caller's to write as well."""
        claimed = super().claim_rows(tokens)
        if claimed is not None and self._index_buffer is not None:
            end = self._indexed + tokens
            if end > self._index_buffer.shape[1]:
                self._grow_index(self._index_buffer, end)
            self._indexed = end
        positions = self.indexer_position_ids
        if claimed is not None and positions is not None:
            self.indexer_position_ids = torch.cat([positions, positions.new_zeros(*positions.shape[:2], tokens)], dim=2)
        return claimed

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens: nothing is copied."""
        super().crop(tokens_to_remove)
        self._indexed = max(0, self._indexed + tokens_to_remove)
        positions = self.indexer_position_ids
        if positions is not None:
            self.indexer_position_ids = positions[..., : max(0, positions.shape[2] + tokens_to_remove)]

    def reset(self) -> None:
        """Forgets everything and frees the buffers."""
        super().reset()
        self.indexer_position_ids = self._index_buffer = None
        self._indexed = 0

    def _take_rows(self, rows: torch.Tensor) -> None:
        """Row i of the index and the positions becomes what row `rows[i]` was."""
        if self._index_buffer is not None:
            self._index_buffer = self._index_buffer.index_select(0, rows.to(self._index_buffer.device))
        if self.indexer_position_ids is not None:
            positions = self.indexer_position_ids
            self.indexer_position_ids = positions.index_select(1, rows.to(positions.device))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """See `GrowingLayer`."""
        super().reorder_cache(beam_idx)
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self._index_buffer is not None:
            self._take_rows(torch.arange(self._index_buffer.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows."""
        super().batch_select_indices(indices)
        if self._index_buffer is not None:
            self._take_rows(torch.arange(self._index_buffer.shape[0], device=indices.device)[indices])

    def allocated_bytes(self) -> int:
        """Bytes of all buffers, spare capacity included."""
        beside = (self._index_buffer, self.indexer_position_ids)
        return super().allocated_bytes() + sum(
            each.numel() * each.element_size() for each in beside if each is not None
        )
