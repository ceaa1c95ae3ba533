"""Attention over keys and values in pages: many sequences of different lengths in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.kernels.native.library import NativeKernels

PAGE_TOKENS = 32
"""Tokens of one sequence that a page holds."""


class KvType(IntEnum):
    """How keys and values are held, as the kernels number it; int8 has a scale for each head of each token."""

    BF16 = 0
    FP16 = 1
    INT8 = 2
    FP32 = 3

    @property
    def dtype(self) -> torch.dtype:
        """Of the pages."""
        return (torch.bfloat16, torch.float16, torch.int8, torch.float32)[self]


class PagedLayerStruct(ctypes.Structure):
    """`SwitchyardPagedLayer`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "sinks")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("type", "heads", "kv_heads", "key_dim", "value_dim", "window", "kept")),
    )


class PieceStruct(ctypes.Structure):
    """`SwitchyardPiece`."""

    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("held", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("first", ctypes.c_int32),
    )


class StatesStruct(ctypes.Structure):
    """`SwitchyardStates`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token_step", ctypes.c_int64),
        ("head_step", ctypes.c_int64),
        ("is_fp32", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one attention layer keeps of a token.

    Attributes:
        heads: of queries; a multiple of `kv_heads`.
        key_dim, value_dim: width of a head.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    def page_bytes(self, kv_type: KvType) -> int:
        """Bytes of one page of one layer, scales included."""
        scales = 8 if kv_type is KvType.INT8 else 0
        per_head = (self.key_dim + self.value_dim) * kv_type.dtype.itemsize + scales
        return PAGE_TOKENS * self.kv_heads * per_head


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """How a layer attends.

    Attributes:
        scale: of scores.
        window: a token sees so many tokens at most, itself among them; 0 sees all.
        kept: and besides the first so many (StreamingLLM, Xiao et al. 2024, section 3.2).
        softcap: bounds scores by softcap * tanh(score / softcap); 0 does not.
        sinks: [heads] float32 logits of attending to nothing, or `None`.
    """

    scale: float
    window: int = 0
    kept: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class PagedLayer:
    """The pages of one attention layer, in RAM.

    Keys lie in them as [pages, kv_heads, key_dim, PAGE_TOKENS], values as [pages, kv_heads, PAGE_TOKENS, value_dim].
    Memory is not touched before tokens come.
    """

    def __init__(self, shape: KvShape, kv_type: KvType, pages: int) -> None:
        self.shape, self.kv_type = shape, kv_type
        heads = (pages, shape.kv_heads)
        self.keys = torch.empty(*heads, shape.key_dim, PAGE_TOKENS, dtype=kv_type.dtype)
        self.values = torch.empty(*heads, PAGE_TOKENS, shape.value_dim, dtype=kv_type.dtype)
        scaled = kv_type is KvType.INT8
        self.key_scales = torch.empty(*heads, PAGE_TOKENS) if scaled else None
        self.value_scales = torch.empty(*heads, PAGE_TOKENS) if scaled else None

    @classmethod
    def of(cls, shape: KvShape, kv_type: KvType, keys: torch.Tensor, values: torch.Tensor) -> PagedLayer:
        """Pages that somebody else has allocated, of a type that needs no scales."""
        layer = cls(shape, kv_type, 0)
        layer.keys, layer.values = keys, values
        return layer

    def struct(self, terms: AttentionTerms) -> PagedLayerStruct:
        """As the kernels read it; it points into these pages and into `terms.sinks`."""
        shape, sinks = self.shape, terms.sinks
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
        return PagedLayerStruct(
            self.keys.data_ptr(),
            self.values.data_ptr(),
            *(scales.data_ptr() if scales is not None else None for scales in (self.key_scales, self.value_scales)),
            sinks.data_ptr() if sinks is not None else None,
            terms.scale,
            terms.softcap,
            int(self.kv_type),
            shape.heads,
            shape.kv_heads,
            shape.key_dim,
            shape.value_dim,
            terms.window,
            terms.kept,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of one sequence.

    Attributes:
        pages: int32, those of the sequence in order, with room for the new tokens.
        held: tokens before them.
        tokens: how many come.
    """

    pages: torch.Tensor
    held: int
    tokens: int


class Pieces:
    """The new tokens of some sequences, one sequence after the other."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.tokens = 0
        self.struct = (PieceStruct * len(pieces))()
        for place, piece in enumerate(pieces):
            self.struct[place] = PieceStruct(piece.pages.data_ptr(), piece.held, piece.tokens, self.tokens)
            self.tokens += piece.tokens

    @property
    def address(self) -> int:
        """Of the structs."""
        return ctypes.addressof(self.struct)


def attend(
    kernels: NativeKernels,
    layer: PagedLayerStruct,
    pieces: Pieces,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Puts keys and values of the new tokens into their pages, and attends.

    A result is the same whatever other sequences are there, and whether tokens come in one call or in several.

    Args:
        queries, keys, values: [T, heads, dim] in bf16 or fp32, all three alike; elements of a head side by side.

    Returns:
        [T, heads, value_dim], of the same type, contiguous.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`.
    """
    states = [_states(tensor) for tensor in (queries, keys, values)]
    out = queries.new_empty(queries.shape[0], layer.heads, layer.value_dim)
    addresses = (ctypes.addressof(struct) for struct in states)
    failed = kernels.paged_attention(
        kernels.pool, ctypes.addressof(layer), pieces.address, len(pieces.pieces), *addresses, out.data_ptr()
    )
    if failed:
        raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left to compute attention.")
    return out


def _states(tensor: torch.Tensor) -> StatesStruct:
    assert tensor.stride(2) == 1
    return StatesStruct(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.dtype == torch.float32)
