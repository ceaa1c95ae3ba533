"""A sequence's pages as the cache of a library model: its forward reads from them, and writes what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from engine.families.library import BLOCK_INDEX, COMPRESSING
from engine.kernels.native.paged_attention import (
    PAGE_TOKENS,
    CompressedPages,
    KvShape,
    KvType,
    LayerPages,
    PagedLayer,
    Piece,
    StatePages,
    pages_seen,
)
from engine.runtime.kv.layers import StateLayer, library_cache

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
    return stored.to(dtype) if scales is None else (stored.float() * scales[..., None]).to(dtype)


class PagedCacheLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """The pages of one layer, for the next tokens of one sequence.

    Attributes:
        window: as the library's `sliding_window`; 0 without one.

    Args:
        pages: those of the sequence, int64, where the layer's are.
        passes: whether attention is computed over the pages, and writes to them: it is handed tokens as they are.
    """

    def __init__(
        self,
        paged: PagedLayer,
        window: int,
        piece: Piece,
        pages: torch.Tensor,
        *,
        passes: bool = False,
    ) -> None:
        super().__init__()
        self._passes = passes
        self.window = self.sliding_window = window
        self.is_sliding = bool(window)
        self._paged, self._piece = paged, piece
        self._pages = pages
        self.cumulative_length = piece.held

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes states [1, H, q, D]; returns those of all tokens, or of the window before these and these."""
        held = self.cumulative_length
        after = self.cumulative_length = held + key_states.shape[-2]
        if self._passes:
            return key_states, value_states
        numbers = torch.arange(held, after, device=self._pages.device)
        pages, rows = self._pages[numbers // PAGE_TOKENS], numbers % PAGE_TOKENS
        paged = self._paged
        for states, part, scales in (
            (key_states, paged.keys, paged.key_scales),
            (value_states, paged.values, paged.value_scales),
        ):
            stored, scale = narrowed(states[0], paged.kv_type)
            part[pages, :, rows] = stored.transpose(0, 1)
            if scales is not None and scale is not None:
                scales[pages, :, rows] = scale.transpose(0, 1)
        if not held and paged.kv_type in (KvType.BF16, KvType.FP32):
            return key_states, value_states
        first = max(0, held - self.window + 1) if self.window else 0
        return (
            self._read(paged.keys, paged.key_scales, first, after, key_states.dtype),
            self._read(paged.values, paged.value_scales, first, after, value_states.dtype),
        )

    def _read(
        self, part: torch.Tensor, scales: torch.Tensor | None, first: int, end: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[1, H, end - first, D]."""
        begin = first // PAGE_TOKENS
        pages = self._pages[begin : -(-end // PAGE_TOKENS)]
        rows = slice(first - begin * PAGE_TOKENS, end - begin * PAGE_TOKENS)
        # By pages, which lie together; indexing another view would copy all pages that there are.
        stored = part.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, rows]
        scale = None if scales is None else scales.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, rows]
        return widened(stored, scale, dtype)[None]

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As the library's layers of these kinds."""
        first = max(0, self.cumulative_length - self.window + 1) if self.window else 0
        return self.cumulative_length - first + query_length, first


class PagedIndexedLayer(PagedCacheLayer):
    """The same with the keys of an index of important tokens."""

    def __init__(self, paged: PagedLayer, piece: Piece, pages: torch.Tensor) -> None:
        super().__init__(paged, 0, piece, pages)
        self._indexed = piece.held
        # Where a model has the positions of its index kept here: of text, as many as there are tokens on each axis.
        positions = torch.arange(piece.held, device=pages.device).expand(_AXES, 1, -1)
        self.indexer_position_ids = positions if piece.held else None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As there; some models look at `keys` then."""
        self.keys, self.values = super().update(key_states, value_states)
        return self.keys, self.values

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Writes [1, q, D]; returns those of all tokens."""
        index, held = self._paged.index, self._indexed
        assert index is not None
        self._indexed = held + states.shape[1]
        numbers = torch.arange(held, self._indexed, device=index.device)
        index[self._pages[numbers // PAGE_TOKENS], 0, numbers % PAGE_TOKENS] = states[0].to(index.dtype)
        return self._read(index, None, 0, self._indexed, index.dtype)[0]

    def update_index(self, states: torch.Tensor) -> torch.Tensor:
        """The same of [1, 1, q, D], as MiniMax-M3 calls it."""
        return self.update_indexer(states[:, 0])[:, None]


_AXES = 3
"""Of positions: time, height and width."""


class PagedCompressedLayer(PagedCacheLayer):
    """Those of a layer that compresses what lies behind its window, as DeepSeek-V4's are called by its modules.

    Args:
        recent, pages: those of the sequence that have its window, and its entries.
    """

    def __init__(
        self,
        compressed: CompressedPages,
        window: int,
        piece: Piece,
        recent: torch.Tensor,
        pages: torch.Tensor,
    ) -> None:
        super().__init__(compressed.recent, window, piece, recent)
        self._compressed, self._entry_pages = compressed, pages
        self._begun: dict[str, int] = {}
        """By what compresses, the first run that these tokens may have filled."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,  # noqa: ARG002 - the same
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, which are also values, as there."""
        held = self.cumulative_length
        after = self.cumulative_length = held + key_states.shape[-2]
        paged = self._compressed.recent
        self._write(paged.keys, held, key_states[0, 0])
        found = self._read(paged.keys, None, max(0, held - self.window + 1), after, key_states.dtype)
        return found, found

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Those [1, q, D] of the next tokens are kept; those of all runs that are full now, and the first's place."""
        held, rate, raw = self._piece.held, self._compressed.rate, self._raw(name)
        self._write(raw, held, torch.cat([kv, gate], dim=-1)[0])
        begun = self._begun[name] = held // rate
        end = (held + kv.shape[1]) // rate * rate
        if end <= begun * rate:
            return kv[:, :0], gate[:, :0], begun * rate
        kept = self._read(raw, None, begun * rate, end, kv.dtype)[0]
        return kept[..., : kv.shape[-1]], kept[..., kv.shape[-1] :], begun * rate

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of the run before these [1, runs, rate, D], what is part of the first of them; None if there is none."""
        begun, rate = self._begun[name], self._compressed.rate
        if not begun:
            return None, None
        first = (begun - 1) * rate
        kv, gate = self._read(self._raw(name), None, first, first + 2 * rate, chunk_kv.dtype)[0].chunk(2, dim=-1)
        # Gates are kept without what the module adds to them by their place in a run.
        before, own = (each[..., :head_dim].to(chunk_gate.dtype) for each in gate.chunk(2, dim=1))
        return kv[:, :rate, :head_dim], before + (chunk_gate[:, 0, :, :head_dim] - own)

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """New entries [1, n, D] are kept; all of them."""
        dim, begun = compressed.shape[-1], self._begun[name]
        entries = self._compressed.entries
        part = entries.keys if name == _COMPRESSOR else entries.index
        assert part is not None
        numbers = torch.arange(begun + compressed.shape[1], device=self._entry_pages.device)
        places, rows = self._compressed.place_of(numbers)
        where, kept = (self._entry_pages[places], rows), self._compressed.rows_of(part, dim)
        kept[where[0][begun:], where[1][begun:]] = compressed[0].to(part.dtype)
        return kept[where][None].to(compressed.dtype)

    def _raw(self, name: str) -> torch.Tensor:
        recent = self._compressed.recent
        raw = recent.values if name == _COMPRESSOR else recent.index
        assert raw is not None
        return raw

    def _write(self, part: torch.Tensor, first: int, states: torch.Tensor) -> None:
        numbers = torch.arange(first, first + len(states), device=self._pages.device)
        part[self._pages[numbers // PAGE_TOKENS], 0, numbers % PAGE_TOKENS] = states.to(part.dtype)


_COMPRESSOR, _INDEXER = "compressor", "indexer"
"""As the library calls what compresses keys, and what does so for an index."""


class PagedStateLayer(StateLayer):
    """A page of states of one layer, which is brought up to date in place.

    Args:
        is_begun: whether it holds that of any tokens; else the layer finds it empty.
    """

    def __init__(self, paged: StatePages, page: int, *, is_begun: bool) -> None:
        super().__init__(1)
        self._where = paged, page
        self.device, self.dtype = paged.states.device, paged.states.dtype
        if is_begun:
            self._take(has_recent=bool(paged.recent.numel()), has_states=bool(paged.states.numel()))
            self.has_previous_state[0] = True

    def _take(self, *, has_recent: bool, has_states: bool) -> None:
        paged, page = self._where
        if has_recent:
            self.conv_states[0] = paged.recent[page][None]
            self.conv_kernel_size[0] = paged.recent.shape[-1]
            self.is_conv_states_initialized[0] = True
        if has_states:
            self.recurrent_states[0] = paged.states[page][None]
            self.is_recurrent_states_initialized[0] = True

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,  # noqa: ARG002 - there is one
        conv_kernel_size: int | None = None,  # noqa: ARG002 - as wide as the page
    ) -> None:
        """As there, in the page."""
        self._take(has_recent=conv_states is not None, has_states=recurrent_states is not None)
        if conv_states is not None:
            self.conv_states[0].zero_()
        if recurrent_states is not None:
            self.recurrent_states[0].zero_()


class PagedCaches:
    """Makes caches of a model's pages.

    Args:
        layers: the pages of each layer, and its window, 0 without one.
        slides: whether layers with windows have pages of their own.
    """

    def __init__(self, layers: Sequence[LayerPages], windows: list[int], *, slides: bool = False) -> None:
        self.layers, self.windows, self.slides = layers, windows, slides
        kinds = [_kinds(paged, slides=slides and window > 0) for paged, window in zip(layers, windows, strict=True)]
        self.in_full = [full for full, _window in kinds]
        """By layer, the pages of all tokens of a sequence."""
        self.in_windows = [window for _full, window in kinds]
        """By layer, those of a window."""
        self.generation = 0
        """Another one whenever they get other memory."""
        self.state_generation = 0
        """Likewise of states."""
        self._point()
        self._states = [paged for paged in layers if isinstance(paged, StatePages) and paged.page_bytes]

    @classmethod
    def like(
        cls, cache: Any, kv_type: KvType, pages: int, states: int, windows: int = 0, *, by_head: bool = False
    ) -> PagedCaches | None:
        """So many pages of what the library's cache has of its layers, of which it has read a token, where these are;
        None if pages cannot hold all of that.

        In a card's memory there are none yet: see `resize`.

        Args:
            kv_type: of keys and values; one that is narrow, of layers without a window only.
            windows: pages of layers with a sliding window; 0 if theirs are those of the others.
        """
        made, slides = list[LayerPages](), list[int]()
        is_narrow = kv_type in (KvType.INT8, KvType.FP16)
        for layer in cache.layers if type(cache) is DynamicCache else [cache]:
            has_window = type(layer) is DynamicSlidingWindowLayer or compresses(layer)
            slides.append(layer.sliding_window if has_window else 0)
            index, own_pages = index_of(layer), windows or pages if slides[-1] else pages
            if type(layer) is DummyLayer:
                made.append(StatePages.like(None, None, states))
            elif type(layer) is StateLayer and layer.number_of_states == 1:
                made.append(StatePages.like(layer.conv_states[0], layer.recurrent_states[0], states))
            elif (
                type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
                and layer.is_initialized
                and (layer.keys.dtype == kv_type.dtype or is_narrow)
            ):
                type_of = _own_type(layer) if is_narrow and slides[-1] else kv_type
                made.append(_pages_like(layer, type_of, own_pages, by_head=by_head))
            elif index is not None:
                made.append(_pages_like(layer, _own_type(layer), pages, by_head=by_head, index_dim=index))
            elif compresses(layer):
                made.append(_compressed_like(layer, pages, windows, by_head=by_head))
            else:
                return None
        return cls(made, slides, slides=windows > 0)

    def _point(self) -> None:
        self.structs = [
            paged.held() if isinstance(paged, StatePages) else paged.held(window)
            for paged, window in zip(self.layers, self.windows, strict=True)
        ]

    @property
    def are_of_card(self) -> bool:
        """Whether they lie in memory that the CPU does not read."""
        parts = [part for paged in self.layers for part in parts_of_pages(paged)]
        parts += [part for paged in self._states for part in (paged.recent, paged.states)]
        return any(part.device.type != "cpu" for part in parts)

    def resize(self, pages: int, windows: int, states: int) -> None:
        """So many of each from now on; the first ones hold what they held.  Without windows' pages of their own all
        layers of tokens have the others."""
        try:
            for in_windows in self.in_windows:  # first: they make room for pages of tokens
                if in_windows is not None and not isinstance(in_windows, StatePages):
                    in_windows.resize(windows)
            for full in self.in_full:
                if isinstance(full, StatePages):
                    self.state_generation += full.resize(states)
                elif full is not None:
                    full.resize(pages)
        finally:  # also where the memory for some of them was refused
            self.generation += 1
            self._point()

    def bytes_by_window(self) -> dict[int, int]:
        """Of the keys and values of a page, of all layers that have the same window; 0 stands for none."""
        found = dict[int, int]()
        for paged, window in zip(self.layers, self.windows, strict=True):
            if isinstance(paged, CompressedPages):
                seen = max(window, paged.reach)
                found[seen] = found.get(seen, 0) + paged.recent.page_bytes
                found[0] = found.get(0, 0) + paged.entries.page_bytes
            elif isinstance(paged, PagedLayer):
                found[window] = found.get(window, 0) + paged.page_bytes
        return found

    @property
    def state_bytes(self) -> int:
        return sum(each.page_bytes for each in self._states)

    @property
    def have_states(self) -> bool:
        return bool(self._states)

    def can_hold(self, model: Any) -> bool:
        """Whether the library's own cache of this model would hold the same of each token."""
        cache = library_cache(model)
        its = cache.layers if cache is not None and type(cache) is DynamicCache else []

        def is_alike(layer: Any, paged: LayerPages, window: int) -> bool:
            if isinstance(paged, StatePages):
                return type(layer) is DummyLayer or (type(layer) is StateLayer and layer.number_of_states == 1)
            if isinstance(paged, CompressedPages):
                return compresses(layer) and bool(layer.sliding_window == window)
            if not window:
                return type(layer) is DynamicLayer or index_of(layer) is not None
            return type(layer) is DynamicSlidingWindowLayer and layer.sliding_window == window

        return len(its) == len(self.layers) and all(map(is_alike, its, self.layers, self.windows))

    def of(self, piece: Piece, *, passes: bool = False) -> Cache:
        """A sequence's, for a forward of its next tokens; see `PagedCacheLayer`."""
        if piece.state != piece.next_state:
            self.copy_state(piece.state, piece.next_state)
        pages = dict[tuple[torch.device, bool], torch.Tensor]()

        def seen(place: torch.device, *, has_window: bool) -> torch.Tensor:
            if (place, has_window) not in pages:
                pages[place, has_window] = pages_seen(piece, has_window=has_window).to(place, torch.int64)
            return pages[place, has_window]

        def layer_of(paged: LayerPages, window: int) -> Any:
            if isinstance(paged, StatePages):
                return _state_layer(paged, piece)
            place = _by_token(paged).keys.device
            own = seen(place, has_window=window > 0)
            if isinstance(paged, CompressedPages):
                return PagedCompressedLayer(paged, window, piece, own, seen(place, has_window=False))
            if paged.index is not None:
                return PagedIndexedLayer(paged, piece, own)
            return PagedCacheLayer(paged, window, piece, own, passes=passes)

        cache = DynamicCache()
        cache.layers = list(map(layer_of, self.layers, self.windows))
        return cache

    def keep(self, piece: Piece, cache: Any) -> None:
        """After a forward: what it wrote is in pages."""

    def copy_page(self, source: int, target: int) -> None:
        _copy(self.in_full, source, target)

    def copy_window(self, source: int, target: int) -> None:
        _copy(self.in_windows, source, target)

    def copy_state(self, source: int, target: int) -> None:
        for paged in self._states:
            paged.copy(source, target)

    def clear_state(self, page: int) -> None:
        for paged in self._states:
            paged.clear(page)

    def discard(self, pages: Sequence[int]) -> None:
        """Returns the memory of these pages to the system, as far as it takes it."""
        _discard(self.in_full, pages)

    def discard_windows(self, pages: Sequence[int]) -> None:
        _discard(self.in_windows, pages)

    def discard_states(self, pages: Sequence[int]) -> None:
        for paged in self._states:
            paged.discard(pages)


def parts_of_pages(paged: LayerPages | None) -> list[torch.Tensor]:
    """Of each token, [pages, H, PAGE_TOKENS, D] and [pages, H, PAGE_TOKENS]; states have none."""
    if isinstance(paged, CompressedPages):
        return [*parts_of_pages(paged.recent), *parts_of_pages(paged.entries)]
    if not isinstance(paged, PagedLayer):
        return []
    parts = (paged.keys, paged.values, paged.key_scales, paged.value_scales, paged.index)
    return [part for part in parts if part is not None and part.shape[-1]]


def _kinds(paged: LayerPages, *, slides: bool) -> tuple[LayerPages | None, LayerPages | None]:
    """What a layer has in pages of all tokens, and in those of a window."""
    if not slides:
        return paged, None
    return (paged.entries, paged.recent) if isinstance(paged, CompressedPages) else (None, paged)


def _by_token(paged: PagedLayer | CompressedPages) -> PagedLayer:
    return paged.recent if isinstance(paged, CompressedPages) else paged


def _copy(layers: Sequence[LayerPages | None], source: int, target: int) -> None:
    for paged in layers:
        for part in parts_of_pages(paged):
            part[target] = part[source]


def _discard(layers: Sequence[LayerPages | None], pages: Sequence[int]) -> None:
    for paged in layers:
        if paged is not None and not isinstance(paged, StatePages):
            paged.discard(pages)


def may_hold(cache: Any) -> bool:
    """Whether pages may hold what a library's cache does, which need not have read anything."""
    return type(cache) is DynamicCache and all(
        type(each) in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
        or (type(each) is StateLayer and each.number_of_states == 1)
        or index_of(each) is not None
        or compresses(each)
        for each in cache.layers
    )


def index_of(layer: Any) -> int | None:
    """Width of the keys by which a layer of the library's cache looks up important tokens, 0 if others do that for it;
    None if it is of another kind."""
    if type(layer) is DynamicIndexedLayer:
        return 0 if layer.indexer_keys is None else int(layer.indexer_keys.shape[-1])
    if type(layer).__name__ == BLOCK_INDEX:
        return 0 if layer.idx_keys is None else int(layer.idx_keys.shape[-1])
    return None


def compresses(layer: Any) -> bool:
    """Whether a layer of the library's cache has a window, and entries of what lies before it."""
    return type(layer).__name__ in COMPRESSING


def has_index(model: Any) -> bool:
    cache = library_cache(model)
    return cache is not None and any(index_of(layer) is not None for layer in cache.layers)


def keeps_latents(model: Any) -> bool:
    """Whether attention keeps what its keys and values are made of."""
    return bool(getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None))


def _shape_of(layer: Any) -> KvShape:
    heads = layer.keys.shape[1]
    return KvShape(heads, heads, layer.keys.shape[-1], layer.values.shape[-1])


def _own_type(layer: Any) -> KvType:
    return KvType.BF16 if layer.keys.dtype == torch.bfloat16 else KvType.FP32


def _pages_like(layer: Any, kv_type: KvType, pages: int, *, by_head: bool, index_dim: int = 0) -> PagedLayer:
    place = layer.keys.device
    if place.type == "cpu":
        return PagedLayer(_shape_of(layer), kv_type, pages, by_head=by_head, index_dim=index_dim)
    return PagedLayer(_shape_of(layer), kv_type, 0, index_dim=index_dim, place=place)


def _compressed_like(layer: Any, pages: int, windows: int, *, by_head: bool) -> CompressedPages:
    raw = {name: 2 * int(of_tokens.shape[-1]) for name, of_tokens in layer.buffer_kv.items()}
    own = {name: int(entries.shape[-1]) for name, entries in layer.compressed_kv.items()}
    in_ram = layer.keys.device.type == "cpu"
    return CompressedPages(
        _own_type(layer),
        layer.compress_rate,
        own[_COMPRESSOR],
        raw[_COMPRESSOR],
        pages if in_ram else 0,
        index_dim=own.get(_INDEXER, 0),
        index_raw=raw.get(_INDEXER, 0),
        overlaps=hasattr(layer, "overlap_kv"),
        windows=windows if in_ram else 0,
        by_head=by_head and in_ram,
        place=None if in_ram else layer.keys.device,
    )


def _state_layer(paged: StatePages, piece: Piece) -> Any:
    is_begun = piece.held > 0
    return PagedStateLayer(paged, piece.next_state, is_begun=is_begun) if paged.page_bytes else DummyLayer()
