"""A layer's attention of the next tokens: into the room that a cache gives them, or into pages of several sequences."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from engine.families import fast_path_of
from engine.kernels.native.library import NativeKernels, out_of_memory
from engine.kernels.native.paged_attention import Pieces
from engine.kernels.native.structs import PagesStruct, PieceStruct
from engine.runtime.fast_path.angles import Angles
from engine.runtime.fast_path.norms import mixer_of
from engine.runtime.kv.growing import GrowingIndexedLayer
from engine.runtime.kv.paged_cache import PagedCacheLayer

Page = tuple[int, int, int | None, int | None, int, int, int | None]
"""Where keys and values lie, where their scales, for how many tokens there is room, the type of them, and where what an
index looks up lies."""

Claim = tuple[Page, int]
"""The page that a layer's next tokens are in, and the tokens before them."""


def holds_index(held: GrowingIndexedLayer, dim: int, tokens: int) -> bool:
    """Whether a cache's layer has room for so many tokens, with keys of an index; `dim`: of these, 0 if it has none."""
    rows = held.index_rows
    if not held.can_claim(tokens) or (rows is None) != (dim == 0):
        return False
    return rows is None or (rows.shape[0] == 1 and rows.shape[2] == dim and rows.dtype == torch.bfloat16)


class ClaimedPage:
    """The structs of one layer's page and of its next tokens.

    Args:
        held, piece: written to with every claim; `address` and `piece_address` are theirs.
    """

    def __init__(self, held: PagesStruct, piece: PieceStruct) -> None:
        self._held, self._piece = held, piece
        self._known: Page | None = None
        self.address, self.piece_address = ctypes.addressof(held), ctypes.addressof(piece)

    @classmethod
    def apart(cls) -> ClaimedPage:
        """Of a layer that is called by itself."""
        return cls(PagesStruct(), PieceStruct())

    def take(self, claim: Claim, tokens: int) -> tuple[int, int, int]:
        """What was claimed for so many tokens: the arguments of a step of them."""
        page, self._piece.held = claim
        self._piece.tokens = tokens
        if page != self._known:  # it seldom moves, and a token of a small model takes few microseconds a layer
            self._known = page
            held = self._held
            held.keys, held.values, held.key_scales, held.value_scales, held.page_tokens, held.type, held.index_keys = (
                page
            )
        return self.address, self.piece_address, 1


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

    def can_claim(self, _tokens: int, _cache: Any) -> bool:
        """It keeps nothing."""
        return True

    def claim(self, _tokens: int, _cache: Any) -> Claim | None:
        """Room for nothing."""
        return (0, 0, None, None, 0, 0, None), 0


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
        self._page = ClaimedPage.apart()

    @property
    def has_index(self) -> bool:
        """Whether an index chooses what tokens attend to."""
        return self._index_struct is not None

    @abstractmethod
    def angles_of(self, positions: Any, tokens: int) -> Angles | None:
        """The angles of so many tokens; `None` if these are others."""

    @abstractmethod
    def can_claim(self, tokens: int, cache: Any) -> bool:
        """Whether `claim` gives room for so many."""

    @abstractmethod
    def claim(self, tokens: int, cache: Any) -> Claim | None:
        """Room for so many tokens; `None` if the cache gives none."""

    def step(self, hidden_states: torch.Tensor, cache: Any, positions: Any) -> torch.Tensor | None:
        """float32 [1, q, hidden], contiguous, with attention's result added; `None` if this is not for it.

        Args:
            cache: one to write into, or the pages of a sequence.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        tokens = hidden_states.shape[1]
        angles = self.angles_of(positions, tokens)
        if isinstance(held := cache.layers[self._index], PagedCacheLayer):
            pieces = held.take(tokens) if angles is not None else None
            return None if pieces is None else self.rows(hidden_states, held.struct, pieces, positions)
        claim = self.claim(tokens, cache) if angles is not None else None
        if angles is None or claim is None:
            return None
        return self._compute(hidden_states, self._page.take(claim, tokens), angles)

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
