"""The next tokens of a few sequences over pages, for steps of a card that are repeated as graphs.

Where tokens go is read from memory that stays: neither the length of a context nor where its pages lie is part of such
a graph.  Where layers take all tokens as one sequence, one of a step's may have several, which are tried together; else
each has one, and is a sequence of its own to layers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from engine.common.footprint import pages_for
from engine.devices.device import upload
from engine.kernels.gpu.latents import LatentContext
from engine.kernels.gpu.pages import PageTable
from engine.kernels.native.paged_attention import (
    PAGE_TOKENS,
    CompressedPages,
    PagedLayer,
    Piece,
    StatePages,
    pages_from,
)
from engine.kernels.reference import store_tokens
from engine.runtime.kv.layers import StateLayer
from engine.runtime.kv.paged_cache import PagedCaches, parts_of_pages

GATHERED_PAGES = 8
"""Pages that steps without a kernel attend to are a multiple of this: few steps have to be captured again."""


class _Places:
    """Where tokens go in the pages of some layers, which are on one device and have the same parts.

    Args:
        window: of the layers, if they have pages of their own for that; else 0.

    Attributes:
        numbers: int64 [3, most]: tokens before each, and the page and the place there that it is stored in.
        pages: int64 [most, n] of the sequence of each.
        entries: int64 [layers, most, parts, 1 + n], see `PageTable`.
    """

    def __init__(self, layers: Sequence[PagedLayer], window: int, most: int, pages: int) -> None:
        self._layers, self._window = layers, window
        first = parts_of_pages(layers[0])
        self.place = first[0].device
        self.numbers = torch.zeros(3, most, dtype=torch.int64, device=self.place)
        self.pages = torch.zeros(most, pages, dtype=torch.int64, device=self.place)
        shape = len(layers), most, len(first), 1 + pages
        self.entries = torch.zeros(shape, dtype=torch.int64, device=self.place)
        self._known = torch.full((most, pages), -1)
        self.point()

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.pages.nbytes

    def point(self) -> None:
        parts = [parts_of_pages(layer) for layer in self._layers]
        heads = torch.tensor([[each.stride(1) * each.element_size() for each in of_layer] for of_layer in parts])
        steps = torch.tensor([[each.stride(0) * each.element_size() for each in of_layer] for of_layer in parts])
        begins = torch.tensor([[each.data_ptr() for each in of_layer] for of_layer in parts])
        self._steps, self._begins = (each.to(self.place)[:, :, None] for each in (steps, begins))
        self.entries[..., 0] = heads.to(self.place)[:, None]
        self.pages.zero_()  # there may be fewer than before
        self._known.fill_(-1)

    def set(self, pieces: Sequence[Piece]) -> None:
        numbers = list[tuple[int, int, int]]()
        for piece in pieces:
            for token in range(piece.tokens):
                held = piece.held + token
                pages = pages_from(piece, self._window, token)[: held // PAGE_TOKENS + 1].long()
                self._put(len(numbers), pages)
                numbers.append((held, int(pages[-1]), held % PAGE_TOKENS))
        self.numbers[:, : len(numbers)].copy_(upload(torch.tensor(numbers).T.contiguous(), self.place))

    def _put(self, row: int, pages: torch.Tensor) -> None:
        """The pages of a row are these: int64 on the host."""
        known = self._known[row, : len(pages)]
        if torch.equal(known, pages):
            return
        first, end = int((known != pages).nonzero()[0]), len(pages)
        known.copy_(pages)
        own = upload(pages[first:], self.place)
        self.pages[row, first:end] = own
        self.entries[:, row, :, 1 + first : 1 + end] = self._begins + self._steps * own


class RowStateLayer(StateLayer):
    """What one layer sums up of some sequences, for a token of each: modules write over it, and wherever it lies, to
    them it is here.

    Args:
        where: int64 [2, rows] on the layer's device: pages to go on from, and those for what becomes of them.
        held: memory for "recent" and "states", while the layer is computed.
    """

    def __init__(self, paged: StatePages, where: torch.Tensor, held: Mapping[str, torch.Tensor]) -> None:
        super().__init__(1)
        self._paged, self._where, self._held = paged, where, held
        if "recent" in held:
            self.conv_states[0] = held["recent"]
            self.conv_kernel_size[0] = held["recent"].shape[-1]
            self.is_conv_states_initialized[0] = True
        if "states" in held:
            self.recurrent_states[0] = held["states"]
            self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = True
        self.device, self.dtype = where.device, next(iter(held.values())).dtype

    def fetch(self, *_: Any) -> None:
        for name, part in self._held.items():
            torch.index_select(getattr(self._paged, name), 0, self._where[0], out=part)

    def leave(self, *_: Any) -> None:
        for name, part in self._held.items():
            getattr(self._paged, name).index_copy_(0, self._where[1], part)


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
        alike = dict[tuple[torch.device, int, int], list[int]]()
        for number, (paged, window) in enumerate(zip(caches.layers, caches.windows, strict=True)):
            if isinstance(paged, PagedLayer):
                parts = parts_of_pages(paged)
                alike.setdefault((parts[0].device, len(parts), window if caches.slides else 0), []).append(number)
        self._of_layer = dict[int, tuple[_Places, int]]()
        self._places = list[_Places]()
        for (_place, _parts, window), numbers in alike.items():
            layers = [paged for paged in (caches.layers[number] for number in numbers) if isinstance(paged, PagedLayer)]
            self._places.append(places := _Places(layers, window, most, pages))
            self._of_layer.update({number: (places, at) for at, number in enumerate(numbers)})
        self.most_pages = pages
        """Of a sequence."""
        self._most = most
        self._states = dict[torch.device, torch.Tensor]()
        """Pages of states, see `RowStateLayer`."""
        self._held = dict[tuple[object, ...], torch.Tensor]()
        """Memory for states, which layers that are alike have one after the other."""
        for paged in caches.layers:
            if isinstance(paged, StatePages) and paged.page_bytes:
                self.states_of(paged, most)

    @property
    def nbytes(self) -> int:
        states = sum(part.nbytes for part in self._held.values())
        return states + sum(places.nbytes for places in self._places)

    def states_of(self, paged: StatePages, rows: int) -> RowStateLayer:
        held = dict[str, torch.Tensor]()
        for name, part in (("recent", paged.recent), ("states", paged.states)):
            if part.shape[1:].numel():
                key = name, part.device, part.dtype, part.shape[1:]
                if key not in self._held:
                    self._held[key] = part.new_empty(self._most, *part.shape[1:])
                held[name] = self._held[key][:rows]
        there = next(iter(held.values())).device
        if there not in self._states:
            self._states[there] = torch.zeros(2, self._most, dtype=torch.int64, device=there)
        return RowStateLayer(paged, self._states[there][:, :rows], held)

    def set(self, ids: Sequence[int], positions: Sequence[int], pieces: Sequence[Piece]) -> int:
        """The next step has these tokens, `positions` of each.

        Returns:
            Pages that hold all that they attend to.
        """
        if self.generation != self._caches.generation:
            self.generation = self._caches.generation
            for places in self._places:
                places.point()
        for places in self._places:
            places.set(pieces)
        for place, where in self._states.items():
            pages = torch.tensor([[piece.state for piece in pieces], [piece.next_state for piece in pieces]])
            where[:, : len(pieces)].copy_(upload(pages, place))
        self._both[:, 0, : len(ids)].copy_(upload(torch.tensor([list(ids), list(positions)]), self._both.device))
        return max(piece.held + piece.tokens - 1 for piece in pieces) // PAGE_TOKENS + 1

    def of_layer(self, number: int) -> tuple[_Places, int]:
        """That of a layer, and which of those that share it the layer is."""
        return self._of_layer[number]


def why_not_repeated(caches: PagedCaches) -> str:
    """Why no step over these pages can be, as the end of a sentence; empty if some may."""
    of_tokens = [paged for paged in caches.layers if not isinstance(paged, StatePages)]
    has_more = any(isinstance(paged, CompressedPages) or paged.index is not None for paged in of_tokens)
    return "layers that keep more than keys and values" if has_more else ""


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
        """Hands on the states of the tokens, [1, H, rows, D] or [rows, H, 1, D]; or of a single one all that it may
        see, what is not there yet as zeros."""
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
        return self.held[0]

    def get_max_length(self) -> int:
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
        LookupError: no layer keeps anything of each token.
    """

    def __init__(self, caches: PagedCaches, places: RowPlaces, rows: int, pages: int, *, gathers: bool) -> None:
        self.offered, self.rows, self.pages, self.gathers = Offered(), rows, pages, gathers
        layers = list[Any]()
        for number, (paged, window) in enumerate(zip(caches.layers, caches.windows, strict=True)):
            if isinstance(paged, StatePages):
                layers.append(places.states_of(paged, rows) if paged.page_bytes else DummyLayer())
                continue
            assert isinstance(paged, PagedLayer)
            where, gathered = places.of_layer(number), pages if gathers else 0
            layers.append(RowsLayer(paged, window, where, rows, gathered, self.offered))
        super().__init__(layers=layers)
        of_tokens = [layer for layer in layers if isinstance(layer, RowsLayer)]
        if not of_tokens:
            raise LookupError("its layers keep nothing of each token")
        self.first = of_tokens[0]
        self.window_of: Callable[[torch.Tensor | None], int] | None = None
        """A mask's, while a step attends over this cache."""

    @contextmanager
    def advancing(self, layers: Sequence[Any]) -> Iterator[None]:
        """Within it a step is computed: what each of a model's layers has summed up is there while it runs, on its own
        card, and goes where it belongs."""
        with ExitStack() as hooks:
            for layer, held in zip(layers, self.layers, strict=False):
                if isinstance(held, RowStateLayer):
                    hooks.callback(layer.register_forward_pre_hook(held.fetch).remove)
                    hooks.callback(layer.register_forward_hook(held.leave).remove)
            yield

    def get_query_offset(self, layer_idx: int = 0) -> Any:  # noqa: ARG002 - the library's signature
        return self.first.get_seq_length()

    def get_seq_length(self, layer_idx: int = 0) -> Any:  # noqa: ARG002
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
