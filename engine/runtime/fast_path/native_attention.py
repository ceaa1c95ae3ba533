"""A layer's attention in native calls: of the next tokens of several sequences, into their pages."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from engine.families import fast_path_of
from engine.kernels.native.library import NativeKernels, out_of_memory
from engine.kernels.native.paged_attention import Pieces
from engine.kernels.native.structs import PagesStruct
from engine.runtime.fast_path.angles import Angles
from engine.runtime.fast_path.norms import mixer_of
from engine.runtime.kv.paged_cache import PagedCacheLayer


class NoAttention:
    """In place of the attention of a layer that is an MLP alone.

    Attributes: as of `NativeAttention`.
    """

    type = ""
    rotated = address = 0
    has_index = False

    def __init__(self, _layer: Any, kernels: NativeKernels) -> None:
        self.kernels = kernels

    @staticmethod
    def can_step(layer: Any) -> bool:
        """Whether this decoder layer is one."""
        path = fast_path_of(layer, "layer")
        return path is not None and path.of_one_part and mixer_of(layer) is None

    def step(self, hidden_states: torch.Tensor, _cache: Any, _positions: Any) -> torch.Tensor:
        """What it is given."""
        return hidden_states

    def rows(self, hidden_states: torch.Tensor, *_where: Any) -> torch.Tensor:
        """What it is given."""
        return hidden_states

    def angles_of(self, _positions: Any, _tokens: int) -> Angles | None:
        """None at all."""
        return Angles.none()


class NativeAttention(ABC):
    """The attention of one decoder layer.

    Attributes:
        type: which of the model's angles it rotates by; see `type_of`.
        rotated: dimensions of each head that are.
        address: of its struct.
    """

    type: str
    rotated: int
    address: int
    _index: int
    _index_struct: ctypes.Structure | None = None

    def __init__(self, kernels: NativeKernels, call: Callable[..., int]) -> None:
        self.kernels, self._call = kernels, call

    @property
    def has_index(self) -> bool:
        """Whether an index chooses what tokens attend to."""
        return self._index_struct is not None

    @abstractmethod
    def angles_of(self, positions: Any, tokens: int) -> Angles | None:
        """The angles of so many tokens; `None` if these are others."""

    def step(self, hidden_states: torch.Tensor, cache: Any, positions: Any) -> torch.Tensor | None:
        """float32 [1, q, hidden], contiguous, with attention's result added; `None` if this is not for it.

        Args:
            cache: the pages of a sequence.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        tokens, held = hidden_states.shape[1], cache.layers[self._index]
        if not isinstance(held, PagedCacheLayer) or self.angles_of(positions, tokens) is None:
            return None
        pieces = held.take(tokens)
        return None if pieces is None else self.rows(hidden_states, held.struct, pieces, positions)

    def rows(self, hidden_states: torch.Tensor, held: PagesStruct, pieces: Pieces, positions: Any) -> torch.Tensor:
        """The same of the next tokens of several sequences, whose keys and values go into pages."""
        angles = self.angles_of(positions, pieces.tokens)
        assert angles is not None
        where = (ctypes.addressof(held), pieces.address_for(held), len(pieces.pieces))
        return self._compute(hidden_states, where, angles)

    def _compute(self, hidden_states: torch.Tensor, where: tuple[int, int, int], angles: Angles) -> torch.Tensor:
        assert hidden_states.dtype == torch.float32
        out = torch.empty_like(hidden_states)
        start = hidden_states.data_ptr()
        if self._call(self.kernels.pool, self.address, *where, start, *angles.arguments, out.data_ptr()):
            raise out_of_memory()
        return out
