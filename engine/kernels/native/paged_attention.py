"""Attention over paged keys and values: many sequences of different lengths in one native call."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from engine.common.footprint import PAGE_TOKENS as PAGE_TOKENS
from engine.kernels.native.library import Isa, NativeKernels, out_of_memory
from engine.kernels.native.structs import PagesStruct, PieceStruct


class KvType(IntEnum):
    """Types of keys and values, numbered as in the kernels; int8 has a scale per head and token."""

    BF16 = 0
    FP16 = 1
    INT8 = 2
    FP32 = 3

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of pages."""
        return (torch.bfloat16, torch.float16, torch.int8, torch.float32)[self]


class PagedLayerStruct(ctypes.Structure):
    _fields_ = (
        ("held", PagesStruct),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "key_dim", "value_dim")),
    )


class StatesStruct(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token_step", ctypes.c_int64),
        ("head_step", ctypes.c_int64),
        ("is_fp32", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one token in one attention layer.

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
    """Attention parameters of a layer.

    Attributes:
        scale: of scores.
        window: sliding window in tokens, including itself; 0: none.
        kept: also attends to this many first tokens (StreamingLLM, Xiao et al. 2024, section 3.2).
        softcap: limits scores to softcap * tanh(score / softcap); 0: no limit.
        sinks: [heads] float32 logits of attending to nothing, or `None`.
    """

    scale: float
    window: int = 0
    kept: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class PagedLayer:
    """The pages of one attention layer, in RAM or in a device's memory.

    Keys are [pages, kv_heads, PAGE_TOKENS, key_dim], values [pages, kv_heads, PAGE_TOKENS, value_dim].  Memory is not
    touched until tokens are added.

    Args:
        by_head: whether a head's pages lie side by side, so that memory delivers consecutive pages of a long sequence
            as fast as one piece; else a page's heads do, so that a page is moved as one.
        index_dim: width of the keys by which an index of important tokens is looked up, [pages, 1, PAGE_TOKENS,
            index_dim]; 0 without one.
        place: the device whose memory they are; None for RAM.
    """

    def __init__(
        self,
        shape: KvShape,
        kv_type: KvType,
        pages: int,
        *,
        by_head: bool = False,
        index_dim: int = 0,
        place: torch.device | None = None,
    ) -> None:
        self.shape, self.kv_type, self.by_head, self.place = shape, kv_type, by_head, place

        def empty(*rest: int, heads: int = shape.kv_heads, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            if by_head:
                return torch.empty(heads, pages, PAGE_TOKENS, *rest, dtype=dtype, device=place).transpose(0, 1)
            return torch.empty(pages, heads, PAGE_TOKENS, *rest, dtype=dtype, device=place)

        self.index = empty(index_dim, heads=1, dtype=kv_type.dtype) if index_dim else None

        self.keys = empty(shape.key_dim, dtype=kv_type.dtype)
        self.values = empty(shape.value_dim, dtype=kv_type.dtype)
        scaled = kv_type is KvType.INT8
        self.key_scales = empty() if scaled else None
        self.value_scales = empty() if scaled else None

    @classmethod
    def of(cls, shape: KvShape, kv_type: KvType, parts: Sequence[torch.Tensor]) -> PagedLayer:
        """Wraps pages allocated elsewhere: keys, values and, where the type has them, the scales of both."""
        layer = cls(shape, kv_type, 0)
        layer.keys, layer.values = parts[:2]
        if len(parts) > 2:
            layer.key_scales, layer.value_scales = parts[2:]
        return layer

    def of_heads(self, own: range) -> PagedLayer:
        """Some of its heads of keys and values, and the queries that belong to them, in the same memory."""
        shape = self.shape
        part = PagedLayer(
            replace(shape, heads=shape.heads // shape.kv_heads * len(own), kv_heads=len(own)), self.kv_type, 0
        )
        cut = slice(own.start, own.stop)
        part.keys, part.values = self.keys[:, cut], self.values[:, cut]
        if self.key_scales is not None and self.value_scales is not None:
            part.key_scales, part.value_scales = self.key_scales[:, cut], self.value_scales[:, cut]
        return part

    def resize(self, pages: int) -> None:
        """So many pages from now on, the first of which hold what they held: of those in a device's memory."""
        assert not self.by_head
        for name in ("keys", "values", "key_scales", "value_scales", "index"):
            if (part := getattr(self, name)) is not None:
                setattr(self, name, _resized(part, pages, self.place))

    def discard(self, pages: Sequence[int]) -> None:
        """Returns the memory of these pages to the system, as far as it takes it; what they held is lost."""
        for part in (self.keys, self.values, self.key_scales, self.value_scales, self.index):
            if part is not None and part.numel() and part.device.type == "cpu":
                for own in part.unbind(1) if self.by_head else [part]:
                    discard(own, pages)

    def held(self, window: int = 0, kept: int = 0) -> PagesStruct:
        """The struct of the pages themselves; it points into them."""
        return PagesStruct(
            self.keys.data_ptr(),
            self.values.data_ptr(),
            *(scales.data_ptr() if scales is not None else None for scales in (self.key_scales, self.value_scales)),
            PAGE_TOKENS,
            int(self.kv_type),
            window,
            kept,
            self.index.data_ptr() if self.index is not None else None,
            run=self.keys.shape[0] if self.by_head else 0,
        )

    @property
    def page_bytes(self) -> int:
        """Of a page."""
        index = math.prod(self.index.shape[1:]) * self.index.element_size() if self.index is not None else 0
        return self.shape.page_bytes(self.kv_type) + index

    def struct(self, terms: AttentionTerms) -> PagedLayerStruct:
        """The kernels' struct; it points into these pages and `terms.sinks`."""
        shape, sinks = self.shape, terms.sinks
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
        return PagedLayerStruct(
            self.held(terms.window, terms.kept),
            sinks.data_ptr() if sinks is not None else None,
            terms.scale,
            terms.softcap,
            shape.heads,
            shape.kv_heads,
            shape.key_dim,
            shape.value_dim,
        )


class CompressedPages:
    """Those of one layer that compresses what lies behind its window (DeepSeek-V4): a run of `rate` tokens is an entry.

    Entries lie in the page that has the last token of their run, so whoever holds a sequence's pages has all of them.
    A run that is not full is computed from what `recent` has of its tokens, and so are those that reach into the run
    before: nothing is summed up beside the pages.

    Attributes:
        recent: of each token the key, which is its value, too; as values what the compressor makes of it; as index what
            that of the index does.
        entries: as keys those of attention, as index those that it looks up; `rows_of` says where each is.
        reach: tokens of which an entry is made.

    Args:
        key_dim: width of keys and entries; `index_dim`: of what the index looks up, 0 without one.
        raw, index_raw: width of what compressors make of a token.
        windows: pages of what is recent; 0 if these are the same.
        place: see `PagedLayer`.
    """

    def __init__(
        self,
        kv_type: KvType,
        rate: int,
        key_dim: int,
        raw: int,
        pages: int,
        *,
        index_dim: int = 0,
        index_raw: int = 0,
        overlaps: bool = False,
        windows: int = 0,
        by_head: bool = False,
        place: torch.device | None = None,
    ) -> None:
        self.rate, self.key_dim, self.index_dim = rate, key_dim, index_dim
        self.reach = 2 * rate if overlaps else rate
        self.of_page = -(-PAGE_TOKENS // rate)

        def width(dim: int) -> int:
            return -(-self.of_page * dim // PAGE_TOKENS)

        def layer(shape: KvShape, pages: int, index_dim: int) -> PagedLayer:
            return PagedLayer(shape, kv_type, pages, by_head=by_head, index_dim=index_dim, place=place)

        self.recent = layer(KvShape(1, 1, key_dim, raw), windows or pages, index_raw)
        self.entries = layer(KvShape(1, 1, width(key_dim), 0), pages, width(index_dim))

    def held(self, window: int) -> PagesStruct:
        struct, entries = self.recent.held(window), self.entries
        struct.entries, struct.entry_step = entries.keys.data_ptr(), entries.keys.stride(0)
        if entries.index is not None:
            struct.entry_keys, struct.entry_key_step = entries.index.data_ptr(), entries.index.stride(0)
        return struct

    def rows_of(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Keys or index of the entries as [pages, most in a page, dim]."""
        return part[:, 0].flatten(1)[:, : self.of_page * dim].view(-1, self.of_page, dim)

    def place_of(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of entries: the place of their page among the sequence's, and their row there."""
        places = ((numbers + 1) * self.rate - 1) // PAGE_TOKENS
        return places, numbers - places * PAGE_TOKENS // self.rate

    @property
    def page_bytes(self) -> int:
        """Of a page of both."""
        return self.recent.page_bytes + self.entries.page_bytes

    def resize(self, pages: int) -> None:
        self.recent.resize(pages)
        self.entries.resize(pages)

    def discard(self, pages: Sequence[int]) -> None:
        self.recent.discard(pages)
        self.entries.discard(pages)


class StatePages:
    """What one layer sums up of all that it has read, in RAM: a page is all of it, of one sequence.

    Memory is not touched until pages are written to.

    Args:
        channels, taps: of its short convolutions, which go on from what they read last.
        state: shape of its recurrent state.
    """

    def __init__(self, channels: int, taps: int, state: tuple[int, ...], pages: int) -> None:
        self.recent = torch.empty(pages, channels, taps)
        self.states = torch.empty(pages, *state)

    @classmethod
    def like(cls, recent: torch.Tensor | None, state: torch.Tensor | None, pages: int) -> StatePages:
        """Pages of what a layer of the library holds of a sequence, [1, channels, taps] and [1, ...], where that is; it
        may have one of both, or nothing at all.  In a card's memory there are none yet: see `resize`."""
        made = cls(0, 0, (0,), pages)
        if recent is not None:
            made.recent = recent.new_empty(pages if recent.device.type == "cpu" else 0, *recent.shape[1:])
        if state is not None:
            made.states = state.new_empty(pages if state.device.type == "cpu" else 0, *state.shape[1:])
        return made

    @property
    def page_bytes(self) -> int:
        """Of a sequence's state."""
        return sum(math.prod(part.shape[1:]) * part.element_size() for part in (self.recent, self.states))

    def clear(self, page: int) -> None:
        """Makes a page that of no tokens."""
        self.recent[page].zero_()
        self.states[page].zero_()

    def copy(self, source: int, target: int) -> None:
        """What a page holds, into another one."""
        self.recent[target].copy_(self.recent[source])
        self.states[target].copy_(self.states[source])

    def resize(self, pages: int) -> bool:
        """See `PagedLayer.resize`; whether they lie elsewhere now."""
        before = self.recent, self.states
        self.recent, self.states = (_resized(part, pages, part.device) for part in before)
        return self.recent is not before[0] or self.states is not before[1]

    def discard(self, pages: Sequence[int]) -> None:
        for part in (self.recent, self.states):
            if part.numel() and part.device.type == "cpu":
                discard(part, pages)

    def held(self) -> PagesStruct:
        """The struct of the pages; it points into them."""
        return PagesStruct(self.recent.data_ptr(), self.states.data_ptr())


LayerPages = PagedLayer | CompressedPages | StatePages
"""Whatever one layer keeps of sequences."""


def _resized(part: torch.Tensor, pages: int, place: torch.device | None) -> torch.Tensor:
    if len(part) == pages:
        return part
    resized = torch.empty(pages, *part.shape[1:], dtype=part.dtype, device=place)
    if kept := min(pages, len(part)):
        resized[:kept] = part[:kept]
    return resized


_GIVE_BACK: int | None = getattr(mmap, "MADV_FREE" if sys.platform == "darwin" else "MADV_DONTNEED", None)
CAN_DISCARD = _GIVE_BACK is not None
"""Whether single pages can be returned to the system.  Otherwise memory is freed only as a whole."""


def discard(part: torch.Tensor, rows: Iterable[int]) -> None:
    """Returns whole pages of these rows of anonymous memory to the system; what they held is lost."""
    if _GIVE_BACK is None or sys.platform == "win32":
        return
    runs, step = list[tuple[int, int]](), part.stride(0) * part.element_size()
    for row in sorted(rows):
        if runs and runs[-1][1] == row:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    for first, last in runs:
        begin = -(-(part.data_ptr() + first * step) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (part.data_ptr() + last * step) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:  # what the system refuses stays where it is
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _GIVE_BACK)


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of one sequence.

    Attributes:
        pages: int32, the sequence's pages in order, with room for the new tokens.
        held: tokens before them.
        tokens: number of new tokens.
        state, next_state: of layers that sum up what they read, the page to go on from and the one that receives what
            becomes of it; they may be the same.
        windows: likewise for layers with a sliding window if these have pages of their own, right from the first one
            that the window of the first new token reaches.
    """

    pages: torch.Tensor
    held: int
    tokens: int
    state: int = 0
    next_state: int = 0
    windows: torch.Tensor | None = None


class Pieces:
    """The new tokens of several sequences, concatenated."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.tokens = 0
        self.struct = (PieceStruct * len(pieces))()
        has_windows = any(piece.windows is not None for piece in pieces)
        self._windows = (PieceStruct * len(pieces))() if has_windows else self.struct
        for place, piece in enumerate(pieces):
            rest = (piece.held, piece.tokens, self.tokens, piece.state, piece.next_state)
            pages = piece.pages.data_ptr()
            self.struct[place] = PieceStruct(pages, *rest, pages)
            if has_windows:
                self._windows[place] = PieceStruct(pages_seen(piece, has_window=True).data_ptr(), *rest, pages)
            self.tokens += piece.tokens

    def address_for(self, held: PagesStruct) -> int:
        """Address of the structs for a layer with these pages."""
        return ctypes.addressof(self._windows if held.window else self.struct)


def pages_seen(piece: Piece, *, has_window: bool) -> torch.Tensor:
    """The pages of a sequence in a layer, with a sliding window or without."""
    return piece.windows if has_window and piece.windows is not None else piece.pages


def pages_from(piece: Piece, window: int, token: int = 0) -> torch.Tensor:
    """The same with 0 for what a window of so many tokens, 0 without one, has passed before the `token`-th new one: who
    reads all of them must not be sent to memory that is gone."""
    if not window or piece.windows is None:
        return piece.pages
    pages = piece.windows.clone()
    pages[: max(0, piece.held + token - window + 1) // PAGE_TOKENS] = 0
    return pages


def attend(
    kernels: NativeKernels,
    layer: PagedLayerStruct,
    pieces: Pieces,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Stores keys and values of the new tokens in their pages, and attends.

    Results do not depend on other sequences, nor on how tokens are split over calls.

    Args:
        queries, keys, values: [T, heads, dim] in bf16 or fp32, all three equal; elements of a head contiguous.

    Returns:
        [T, heads, value_dim], of the same type, contiguous.
    """
    states = [_states(tensor) for tensor in (queries, keys, values)]
    out = queries.new_empty(queries.shape[0], layer.heads, layer.value_dim)
    addresses = (ctypes.addressof(struct) for struct in states)
    failed = kernels.paged_attention(
        kernels.pool,
        ctypes.addressof(layer),
        pieces.address_for(layer.held),
        len(pieces.pieces),
        *addresses,
        out.data_ptr(),
    )
    if failed:
        raise out_of_memory()
    return out


def _states(tensor: torch.Tensor) -> StatesStruct:
    assert tensor.stride(2) == 1
    return StatesStruct(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.dtype == torch.float32)


FEWEST_TOKENS = 16
"""Fewer tokens do not fill the blocks of queries that the kernel multiplies at once."""

_NO_RANGE = 2


class PromptStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head", "key_head", "value_token", "value_head")),
        ("sees", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sees_token", "tokens", "held")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "key_dim", "value_dim")),
        ("scale", ctypes.c_float),
    )


def is_faster(kernels: NativeKernels) -> bool:
    """Whether these kernels beat torch's operators at a prompt's attention."""
    return kernels.isa is not Isa.PORTABLE


def attend_prompt(
    kernels: NativeKernels,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sees: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """[T, heads, value_dim] bf16, contiguous; `None` if a token sees nothing, or no single range of keys.

    Shares are rounded to bf16 before they are multiplied with values.

    Args:
        queries: bf16 [heads, T, key_dim] of the last T tokens.
        keys, values: bf16 [kv_heads, held, key_dim] and [kv_heads, held, value_dim].
        scale: of scores; positive.
        sees: bool [T, held], whether a token sees a key; `None`: all before it, and itself.
    """
    queries, values = _with_whole_heads(queries), _with_whole_heads(values)
    if keys.stride(2) != 1 or keys.stride(1) != keys.shape[2]:
        keys = keys.contiguous()
    if sees is not None and sees.stride(1) != 1:
        sees = sees.contiguous()
    heads, tokens, key_dim = queries.shape
    struct = PromptStruct(
        *(tensor.data_ptr() for tensor in (queries, keys, values)),
        *(queries.stride(1), queries.stride(0), keys.stride(0), values.stride(1), values.stride(0)),
        sees.data_ptr() if sees is not None else None,
        sees.stride(0) if sees is not None else 0,
        *(tokens, keys.shape[1], heads, keys.shape[0], key_dim, values.shape[2]),
        scale,
    )
    out = queries.new_empty(tokens, heads, values.shape[2])
    failed = kernels.prompt_attention(kernels.pool, ctypes.addressof(struct), out.data_ptr())
    if failed == _NO_RANGE:
        return None
    if failed:
        raise out_of_memory()
    return out


def _with_whole_heads(states: torch.Tensor) -> torch.Tensor:
    return states if states.stride(2) == 1 else states.contiguous()
