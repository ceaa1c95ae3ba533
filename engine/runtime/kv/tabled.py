"""The next tokens of a few sequences over pages, for steps of a card that are repeated as graphs.

Where tokens go is read from memory that stays: neither the length of a context nor where its pages lie is part of such
a graph.  A sequence may have several tokens in a step, which are tried together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from engine.common.footprint import pages_for
from engine.devices.device import upload
from engine.kernels.gpu.latents import LatentContext
from engine.kernels.gpu.pages import PageTable
from engine.kernels.native.paged_attention import PAGE_TOKENS, PagedLayer, Piece, StatePages
from engine.kernels.reference import store_tokens
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.kv.parts import parts_of_pages

GATHERED_PAGES = 8
"""Pages that steps without a kernel attend to are a multiple of this: few steps have to be captured again."""


class _Places:
    """Where tokens go in the pages of some layers, which are on one device and have the same parts.

    Attributes:
        numbers: int64 [3, most]: tokens before each, and the page and the place there that it is stored in.
        pages: int64 [most, n] of the sequence of each.
        entries: int64 [layers, most, parts, 1 + n], see `PageTable`.
    """

    def __init__(self, layers: Sequence[PagedLayer], most: int, pages: int) -> None:
        self._layers = layers
        first = parts_of_pages(layers[0])
        self.place = first[0].device
        self.numbers = torch.zeros(3, most, dtype=torch.int64, device=self.place)
        self.pages = torch.zeros(most, pages, dtype=torch.int64, device=self.place)
        shape = len(layers), most, len(first), 1 + pages
        self.entries = torch.zeros(shape, dtype=torch.int64, device=self.place)
        self.point()

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.pages.nbytes

    def point(self) -> None:
        """Layers have other memory than before."""
        parts = [parts_of_pages(layer) for layer in self._layers]
        heads = torch.tensor([[each.stride(1) * each.element_size() for each in of_layer] for of_layer in parts])
        steps = torch.tensor([[each.stride(0) * each.element_size() for each in of_layer] for of_layer in parts])
        begins = torch.tensor([[each.data_ptr() for each in of_layer] for of_layer in parts])
        self._steps, self._begins = (each.to(self.place)[:, :, None] for each in (steps, begins))
        self.entries[..., 0] = heads.to(self.place)[:, None]
        self.pages.zero_()  # there may be fewer than before

    def put(self, row: int, first: int, pages: torch.Tensor) -> None:
        """The pages of a row, from its `first` one on, are these: int64 on the host."""
        own = upload(pages, self.place)
        end = first + len(pages)
        self.pages[row, first:end] = own
        self.entries[:, row, :, 1 + first : 1 + end] = self._begins + self._steps * own


class RowPlaces:
    """Of the next tokens of a model's sequences, in memory that stays.

    Args:
        most: tokens of a step.
        context_tokens: of the longest sequence.
        place: where a model's tokens come in.

    Attributes:
        ids, positions: int64 [1, most].
    """

    def __init__(self, caches: PagedCaches, most: int, context_tokens: int, place: torch.device) -> None:
        self._caches, self.generation = caches, caches.generation
        both = torch.zeros(2, 1, most, dtype=torch.int64, device=place)
        self.ids, self.positions, self._both = both[0], both[1], both
        pages = pages_for(context_tokens) + 1
        alike = dict[tuple[torch.device, int], list[int]]()
        for number, paged in enumerate(caches.layers):
            if isinstance(paged, PagedLayer):
                parts = parts_of_pages(paged)
                alike.setdefault((parts[0].device, len(parts)), []).append(number)
        self._of_layer = dict[int, tuple[_Places, int]]()
        self._places = list[_Places]()
        for numbers in alike.values():
            layers = [paged for paged in (caches.layers[number] for number in numbers) if isinstance(paged, PagedLayer)]
            self._places.append(places := _Places(layers, most, pages))
            self._of_layer.update({number: (places, at) for at, number in enumerate(numbers)})
        self.most_pages = pages
        """Of a sequence."""
        self._known = torch.full((most, pages), -1)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(places.nbytes for places in self._places)

    def set(self, ids: Sequence[int], positions: Sequence[int], pieces: Sequence[Piece]) -> int:
        """The next step has these tokens, `positions` of each.

        Returns:
            Pages that hold all that they attend to.
        """
        if self.generation != self._caches.generation:
            self.generation = self._caches.generation
            self._known.fill_(-1)
            for places in self._places:
                places.point()
        held = [piece.held + at for piece in pieces for at in range(piece.tokens)]
        tables = [piece.pages for piece in pieces for _ in range(piece.tokens)]
        for row, (pages, place) in enumerate(zip(tables, held, strict=True)):
            now = pages[: place // PAGE_TOKENS + 1].long()
            known = self._known[row, : len(now)]
            if not torch.equal(known, now):
                first = int((known != now).nonzero()[0])
                for places in self._places:
                    places.put(row, first, now[first:])
                known.copy_(now)
        count, before = len(ids), torch.tensor(held)
        page = torch.tensor([int(pages[place // PAGE_TOKENS]) for pages, place in zip(tables, held, strict=True)])
        numbers = torch.stack([before, page, before % PAGE_TOKENS])
        for places in self._places:
            places.numbers[:, :count].copy_(upload(numbers, places.place))
        self._both[:, 0, :count].copy_(upload(torch.tensor([list(ids), list(positions)]), self._both.device))
        return max(held) // PAGE_TOKENS + 1

    def of_layer(self, number: int) -> tuple[_Places, int]:
        """That of a layer, and which of those that share it the layer is."""
        return self._of_layer[number]


class RowsLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """The pages of one layer, as the library's model is given them.

    Attributes:
        window: of its pages; 0 without one.
        table: where they are, for a card's kernels.

    Args:
        rows: tokens of the step.
        gathered: so many pages are given to a module that attends by itself; 0 where its attention is called for.
    """

    is_compileable = True  # what the library calls a layer whose masks are to be made on the device
    is_sliding = False

    def __init__(
        self, paged: PagedLayer, window: int, where: tuple[_Places, int], rows: int, gathered: int, offered: Offered
    ) -> None:
        super().__init__()
        self.paged, self.window, self.rows = paged, window, rows
        places, number = where
        self._places, self.gathered, self._offered = places, gathered, offered
        self.table = PageTable.of(paged.kv_type, places.entries[number, :rows])
        self.held, self.page, self.slot = (each[:rows] for each in places.numbers)
        self.is_initialized = True

    def pages(self, count: int) -> torch.Tensor:
        """The first ones of each sequence, int64 [rows, count]."""
        return self._places.pages[: self.rows, :count]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """It is there from the start."""

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes [rows, heads, dim] to their pages."""
        store_tokens(self.paged, self.page, self.slot, keys, values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands on the states of the tokens, [1, H, rows, D]; or of a single one all that it may see, what is not there
        yet as zeros."""
        if not self.gathered:
            self._offered.put(key_states, self)
            return key_states, value_states
        self.store(key_states[:, :, 0], value_states[:, :, 0])
        keys, values = gathered_pages(self.paged, self.pages(self.gathered), key_states.dtype)
        unseen = torch.arange(keys.shape[2], device=keys.device) > self.held
        return tuple(part.masked_fill(unseen[:, None], 0) for part in (keys, values))  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows, which token the first of them is): no mask is made of it."""
        return query_length, 0

    def get_seq_length(self) -> Any:
        """Tokens before the first one, as a tensor."""
        return self.held[0]

    def get_max_length(self) -> int:
        """Rows."""
        return self.table.tokens


def gathered_pages(layer: PagedLayer, pages: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [R, kv_heads, n, dim] in pages [R, P], which are where the layer's are."""

    def read(store: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        # [R, P, heads, PAGE_TOKENS, dim] -> [R, heads, P * PAGE_TOKENS, dim]
        found = store[pages].transpose(1, 2).flatten(2, 3)
        if scales is None:
            return found.to(dtype)
        return (found.float() * scales[pages].transpose(1, 2).flatten(2, 3)[..., None]).to(dtype)

    return read(layer.keys, layer.key_scales), read(layer.values, layer.value_scales)


class Offered:
    """The tokens' own keys as a layer handed them on last, and which layer that was."""

    def __init__(self) -> None:
        self._keys: torch.Tensor | None = None
        self._layer: RowsLayer | None = None

    def put(self, keys: torch.Tensor, layer: RowsLayer) -> None:
        """A layer hands on these keys."""
        self._keys, self._layer = keys, layer

    def take(self, keys: torch.Tensor) -> RowsLayer:
        """The layer of these keys.

        Raises:
            LookupError: they are not what a layer handed on last.
        """
        if self._layer is None or self._keys is not keys:
            raise LookupError("its attention does not get its layer's keys")
        return self._layer


class RowsCache(Cache):  # type: ignore[misc]
    """The pages of all layers, for so many tokens.

    Attributes:
        rows: tokens of the step.
        pages: that it reads where no kernel does.
        gathers: whether modules are given all that a token sees, and attend by themselves.

    Raises:
        LookupError: some layer keeps something else.
    """

    def __init__(self, caches: PagedCaches, places: RowPlaces, rows: int, pages: int, *, gathers: bool) -> None:
        self.offered, self.rows, self.pages, self.gathers = Offered(), rows, pages, gathers
        layers = list[Any]()
        for number, (paged, window) in enumerate(zip(caches.layers, caches.windows, strict=True)):
            if isinstance(paged, PagedLayer) and paged.index is None:
                where, gathered = places.of_layer(number), pages if gathers else 0
                layers.append(RowsLayer(paged, window, where, rows, gathered, self.offered))
            elif isinstance(paged, StatePages) and not paged.page_bytes:
                layers.append(DummyLayer())
            else:
                raise LookupError("its layers keep more than keys and values")
        super().__init__(layers=layers)
        self.first = next(layer for layer in layers if isinstance(layer, RowsLayer))
        self.window_of: Callable[[torch.Tensor | None], int] | None = None
        """A mask's, while a step attends over this cache."""

    def get_query_offset(self, layer_idx: int = 0) -> Any:  # noqa: ARG002 - the library's signature
        """Tokens before the first one."""
        return self.first.get_seq_length()

    def get_seq_length(self, layer_idx: int = 0) -> Any:  # noqa: ARG002
        """Tokens before the first one."""
        return self.first.get_seq_length()

    def held_on(self, place: torch.device) -> torch.Tensor:
        """Tokens before each, int64 [rows], on a device that has layers."""
        found: torch.Tensor = next(
            each.held for each in self.layers if isinstance(each, RowsLayer) and each.held.device == place
        )
        return found

    def latents(self, layer: int, mask: torch.Tensor | None) -> LatentContext:
        """Of a layer that keeps latents.

        Raises:
            LookupError: the mask is not one of the step's, or the layer keeps none.
        """
        at = self.layers[layer]
        if self.window_of is None or not isinstance(at, RowsLayer):
            raise LookupError("its layer has no pages")
        return LatentContext(at.table, at.held, self.window_of(mask))
