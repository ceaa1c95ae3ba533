"""A KV cache layer in less than the model's own type: int8 with a scale for each head and token, or fp16."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from engine.experts.record import empty_in_huge_pages
from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType
from engine.runtime.kv.growing import grown_capacity

_MOST_FP16 = 65504.0


def narrowed(states: torch.Tensor, kv_type: KvType) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States [..., D] as this type stores them, and their scales [...] if it has any."""
    if kv_type is KvType.INT8:
        most = states.float().abs().amax(-1)
        stored = (states.float() * (127 / most.clamp(min=1e-30))[..., None]).round().nan_to_num(0)
        return stored.to(torch.int8), most / 127
    if kv_type is KvType.FP16:
        return states.clamp(-_MOST_FP16, _MOST_FP16).to(torch.float16), None
    return states, None


def widened(stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What was `narrowed`, in another type."""
    return stored.to(dtype) if scales is None else (stored.float() * scales[..., None]).to(dtype)


class NarrowLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """Keys and values [B, H, n, D] in buffers [B, H, capacity, D] of a type of their own.

    Native kernels read them as they are.  The library gets them in the model's type, all of them again at every call: a
    prompt's chunk can afford that, a single token cannot.

    Args:
        kv_type: INT8 or FP16.
        most_tokens: capacity never exceeds this, rounded up to whole pages, unless more tokens do come.
    """

    def __init__(self, kv_type: KvType, most_tokens: int | None = None) -> None:
        self.kv_type = kv_type
        self.most_tokens = most_tokens
        self._length = 0
        self._buffers: list[torch.Tensor] = []
        """Keys and values, then the scales of both [B, H, capacity] where the type has them."""
        super().__init__()

    @property
    def keys(self) -> Any:
        """What is held, in the model's type."""
        return self._wide(0)

    @keys.setter
    def keys(self, keys: Any) -> None:
        """The library's own methods set what is theirs; nothing of it is read here."""

    @property
    def values(self) -> Any:
        """What is held, in the model's type."""
        return self._wide(1)

    @values.setter
    def values(self, values: Any) -> None:
        """As for keys."""

    def _wide(self, part: int) -> torch.Tensor | None:
        if not self._buffers:
            return None
        held = self._buffers[part].narrow(-2, 0, self._length)
        scales = self._buffers[2 + part].narrow(-1, 0, self._length) if len(self._buffers) > 2 else None
        return widened(held, scales, self.dtype)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remembers the model's type."""
        super().lazy_initialization(key_states, value_states)
        self.dtype = key_states.dtype

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002 - the library's signature
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states [B, H, q, D]; returns all keys and values so far, in their type."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, tokens = self._length, key_states.shape[-2]
        self._make_room(start + tokens, (key_states, value_states))
        for part, states in enumerate((key_states, value_states)):
            stored, scale = narrowed(states, self.kv_type)
            self._buffers[part].narrow(-2, start, tokens).copy_(stored)
            if scale is not None:
                self._buffers[2 + part].narrow(-1, start, tokens).copy_(scale)
        self._length = start + tokens
        return self.keys, self.values

    def can_claim(self, tokens: int) -> bool:  # noqa: ARG002 - any number
        """Whether `claim_rows` gives so many."""
        return bool(self._buffers) and self._buffers[0].shape[0] == 1

    def claim_rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """As `GrowingLayer.claim_rows`; `scales` are those of the same rows."""
        if not self.can_claim(tokens):
            return None
        start = self._length
        self._make_room(start + tokens, self._buffers[:2])
        self._length = start + tokens
        return self._buffers[0], self._buffers[1], start

    def room_for(self, tokens: int) -> tuple[torch.Tensor, ...] | None:
        """As `GrowingLayer.room_for`, with the scales of both [1, H, capacity] where the type has them."""
        if not self.can_claim(tokens):
            return None
        self._make_room(tokens, self._buffers[:2])
        return tuple(self._buffers)

    def wrote(self, tokens: int) -> None:
        """Rows have been written into the buffers from outside: they hold so many tokens now."""
        self._length = tokens

    def stored(self) -> list[torch.Tensor]:
        """Keys and values [H, n, D] of the one sequence in their type, and the scales [H, n] of both if it has any."""
        return [buffer[0].narrow(1, 0, self._length) for buffer in self._buffers]

    def restore(self, stored: list[torch.Tensor]) -> None:
        """Holds what another layer had `stored`, and nothing else."""
        keys = stored[0]
        if not self.is_initialized:
            like = torch.empty(0, dtype=torch.bfloat16, device=keys.device)
            self.lazy_initialization(like, like)
        self._length, self._buffers = 0, []
        self._make_room(keys.shape[1], [part[None] for part in stored[:2]])
        self._length = keys.shape[1]
        for buffer, part in zip(self._buffers, stored, strict=True):
            buffer[0].narrow(1, 0, self._length).copy_(part)

    @property
    def scales(self) -> tuple[int | None, int | None]:
        """Addresses of the scales of keys and of values, if they have any."""
        if len(self._buffers) == 2:
            return None, None
        return self._buffers[2].data_ptr(), self._buffers[3].data_ptr()

    def _make_room(self, tokens: int, like: Any) -> None:
        if self._buffers and tokens <= self._buffers[0].shape[-2]:
            return
        capacity = grown_capacity(self._length, tokens, self.most_tokens)
        capacity = -(-capacity // PAGE_TOKENS) * PAGE_TOKENS  # kernels read scales by whole pages
        shapes = [(*states.shape[:-2], capacity, states.shape[-1]) for states in like]
        made = [empty_in_huge_pages(shape, dtype=self.kv_type.dtype, device=self.device) for shape in shapes]
        if self.kv_type is KvType.INT8:
            made += [torch.zeros(shape[:-1], device=self.device) for shape in shapes]
        for old, new in zip(self._buffers, made, strict=False):
            new.narrow(2, 0, self._length).copy_(old.narrow(2, 0, self._length))
        self._buffers = made

    def _each_row(self, change: Any) -> None:
        self._buffers = [change(buffer) for buffer in self._buffers]

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` tokens: nothing is copied."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}, but must be 0 or negative.")
        self._length = max(0, self._length + tokens_to_remove)

    def reset(self) -> None:
        """Forgets everything and frees the buffers."""
        self._length = 0
        self._buffers = []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; `beam_idx` may be longer than the batch, which widens it."""
        self._each_row(lambda buffer: buffer.index_select(0, beam_idx.to(buffer.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._each_row(lambda buffer: buffer.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows."""
        self._each_row(lambda buffer: buffer[indices, ...])

    def offload(self) -> None:
        """Not for this layer: its buffers stay where they were made."""
        raise NotImplementedError("A narrow layer is not offloaded.")

    def prefetch(self) -> None:
        """Nothing is ever offloaded."""

    def allocated_bytes(self) -> int:
        """Bytes of the buffers, spare capacity included."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def token_bytes(self) -> int:
        """Bytes that one token of one sequence takes."""
        return sum(buffer[0, :, 0].nbytes for buffer in self._buffers)
