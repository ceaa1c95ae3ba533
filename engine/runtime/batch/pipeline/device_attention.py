"""Attention on the device: keys and values of each micro-batch come from RAM, new ones go back (FlexGen, S4).

A share of the pages may stay on the device (MoE-Lightning's r_c): every so-manieth one, so that whichever rows are in
progress, that share of each of them need not cross the link.

Of several cards each has some heads of keys and values, and the queries that belong to them.  Keys and values cross
the links of all at once.  Queries and new keys and values are the first card's, which sends each card its part and puts
what comes back side by side (tensor parallelism, as MoE-Lightning does it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.common.costs import Cost, CostModel
from engine.common.errors import EngineError, ErrorCode
from engine.common.falls import passed_over
from engine.devices.device import Device, Direction, Event, upload
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory, with_room
from engine.experts.activations import Buffer
from engine.experts.shared import Ways, joined
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import PAGE_TOKENS, AttentionTerms, KvShape, PagedLayer, Pieces
from engine.planner.placement import expert_ranges
from engine.runtime.batch.pipeline.layer_run import AttentionCall
from engine.runtime.batch.pipeline.paged import PagedAttention, PlacedRows, work_of
from engine.runtime.kv.paged_cache import parts_of_pages
from engine.runtime.load.devices import DeviceExperts
from engine.telemetry import lanes

_PLACES = 2
"""Micro-batches whose pages have room on the device: one computes while the next one's arrive."""
_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it are spread evenly over [0, 1), and repeat in no row's number of pages."""
_SLACK = 4
"""A context that grows gets room for one part in so many more."""


class StayingPages:
    """Which pages are on the device: a share of the first `among`, spread so evenly that rows have like shares.

    Their places in RAM are not touched.

    Attributes:
        numbers: those on the device, in the order of their places.
    """

    def __init__(self, share: float = 0.0, among: int = 0) -> None:
        pages = torch.arange(among)
        self.numbers = pages[(pages * _GOLDEN) % 1.0 < share] if share < 1 else pages
        self._places = torch.full((among + 1,), -1)
        self._places[self.numbers] = torch.arange(len(self.numbers))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.numbers)

    def index(self, pages: torch.Tensor) -> torch.Tensor:
        """The place of each page among those on the device; -1 for those in RAM."""
        return self._places[pages.clamp(max=len(self._places) - 1)]


class _Room:
    """Pages on the device for layers with keys and values of one shape: those that stay, of all these layers, then two
    places for micro-batches; and buffers in RAM, pinned where the device has that, for copies."""

    def __init__(self, device: Device, like: PagedLayer) -> None:
        self._device, self._like = device, like
        self.layers: list[PagedLayer] = []
        """Those whose pages stay, in the order in which these lie here."""
        self.staying, self.staged = 0, 0
        self.pages: PagedLayer | None = None
        self._memory: torch.Tensor | None = None
        self._outgoing: list[torch.Tensor] = []
        self._landing = Buffer(device.host_memory.allocate, device.host_memory.release)

    def make(self, staying: int, staged: int) -> None:
        """Makes room for so many pages; what was there is gone.

        Raises:
            DeviceMemoryError: there is none; nothing is held.
        """
        self.release()  # what is there may be smaller, and both have no room
        sizes = [part[:1].nbytes for part in parts_of_pages(self._like)]
        count = staying + _PLACES * staged
        self._memory = memory = self._device.memory.allocate(count * sum(sizes), MemoryCategory.KV)
        memory.zero_()  # pages that nobody sees are multiplied by zero here and there: they must be numbers
        self._outgoing = [self._device.host_memory.allocate(staged * sum(sizes)) for _ in range(_PLACES)]
        self.staying, self.staged = staying, staged
        self.pages = PagedLayer.of(self._like.shape, self._like.kv_type, _parts_in(memory, self._like, count))

    def put_back(self, held: Sequence[torch.Tensor], staged: int) -> None:
        """What was there with room for `staged` pages of a micro-batch, some of which may be on their way."""
        for part, before in zip(parts_of_pages(self.pages) if self.pages is not None else [], held, strict=False):
            part[: self.staying].copy_(before[: self.staying])
            for number in range(_PLACES):
                begin, first = self.staying + number * staged, self.place(number)
                part[first : first + staged].copy_(before[begin : begin + staged])

    def bring_home(self, held: Sequence[torch.Tensor], numbers: torch.Tensor) -> None:
        """Writes the pages that stayed to their places in RAM."""
        for number, layer in enumerate(self.layers):
            first = number * len(numbers)
            for into, there in zip(parts_of_pages(layer), held, strict=True):
                into[numbers] = there[first : first + len(numbers)].cpu()

    def number_of(self, layer: PagedLayer) -> int:
        """Of a layer whose pages stay; 0 of any other."""
        return next((number for number, each in enumerate(self.layers) if each is layer), 0)

    def place(self, number: int) -> int:
        """The first page of a micro-batch's place."""
        return self.staying + number * self.staged

    def outgoing(self, number: int, count: int) -> list[torch.Tensor]:
        """Memory in RAM for so many pages of a place."""
        return _parts_in(self._outgoing[number], self._like, count)

    def landing(self, tokens: int) -> list[torch.Tensor]:
        """Memory in RAM for keys and values of so many tokens; one thread may use it at a time."""
        pages = -(-tokens // PAGE_TOKENS)
        landing = self._landing.get(pages * sum(part[:1].nbytes for part in parts_of_pages(self._like)))
        shapes = [(tokens, part.shape[1], *part.shape[3:]) for part in parts_of_pages(self._like)]
        return _views(landing, shapes, [part.dtype for part in parts_of_pages(self._like)])

    def release(self) -> None:
        """Frees everything, once nothing is in flight."""
        if self._memory is not None:
            self._device.memory.release(self._memory)
        for buffer in self._outgoing:
            self._device.host_memory.release(buffer)
        self._landing.free()
        self.pages = self._memory = None
        self._outgoing, self.staying, self.staged = [], 0, 0


@dataclass(frozen=True, slots=True)
class _Seen:
    """Pages of a micro-batch's rows that its tokens see, the same for all layers with one window.

    Attributes:
        moving: int64, those in RAM that hold something, each once.
        room: pages of RAM in all: behind those that move there are new ones.
        where: int64 [R, P], of each row's pages: the place among those, or -1 - the place among those on the device.
        back: the new tokens [n] whose pages are in RAM.
    """

    rows: PlacedRows
    moving: torch.Tensor
    room: int
    where: torch.Tensor
    back: torch.Tensor


@dataclass(frozen=True, slots=True)
class CacheAhead:
    """Keys and values of a micro-batch in transfer to the device."""

    layer: PagedLayer
    room: _Room
    place: int
    seen: _Seen
    arrived: Future[Event]


class DeviceAttention:
    """Computes attention on the device over pages in RAM and, if some stay, there.

    Args:
        kernels: native kernels that compute for an emulated device.
        costs: that is told how long it took.
    """

    def __init__(self, device: Device, kernels: NativeKernels | None, costs: CostModel) -> None:
        self._device, self._costs = device, costs
        self._computed: list[tuple[float, Event]] = []
        self._paged = PagedAttention(device.torch_device, kernels)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="batch cache")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="batch cache back")
        self.staying = StayingPages()
        self._rooms: dict[KvShape, _Room] = {}
        self._seen: dict[tuple[int, int, int], tuple[Pieces, _Seen]] = {}
        self._turn = 0
        self._used: list[Event | None] = [None] * _PLACES
        self._under_way: list[Future[Event]] = []

    def keep(self, layers: Sequence[PagedLayer], staying: StayingPages, staged: int) -> None:
        """From now on these pages of all layers are on the device, beside room for `staged` pages of a micro-batch.

        Nothing may have been written to them yet.

        Raises:
            DeviceMemoryError: the device has no room; all pages are in RAM then.
        """
        for layer in layers:
            self._room(layer).layers.append(layer)
        try:
            for room in self._rooms.values():
                room.make(staying.count * len(room.layers), staged)
        except DeviceMemoryError:
            self.forget()
            raise
        self.staying = staying
        self._device.h2d_stream.wait(self._device.compute_stream.record())

    def leave(self) -> None:
        """From now on all pages are in RAM.  No micro-batch may be on its way.

        Raises:
            EngineError: the device failed.
        """
        if self.staying.count:
            self._wait()
            for room in self._rooms.values():
                if room.pages is not None:
                    room.bring_home(parts_of_pages(room.pages), self.staying.numbers)
        self.forget()

    def fetch(self, layer: PagedLayer, terms: AttentionTerms, pieces: Pieces, index: int) -> CacheAhead:
        """Copies what these rows see of keys and values to the device, after all weights already queued.

        Args:
            index: index of the layer, for the timeline.

        Raises:
            DeviceMemoryError: the device has no room.
            EngineError: the device failed, or has not even the room any more that there was.
        """
        seen, room = self._seen_by(pieces, terms), self._room(layer)
        self._make_room(room, seen.room)
        place, self._turn = self._turn, (self._turn + 1) % _PLACES
        assert room.pages is not None
        count, used, first = len(seen.moving), self._used[place], room.place(place)
        landed = [part[first : first + count] for part in parts_of_pages(room.pages)]
        stream, label = self._device.h2d_stream, (lanes.KEYS_VALUES, index, -1, 1)

        def work() -> Event:
            if used is not None:
                used.wait()  # what is there, and the buffer that it came from, are needed no more
            event = None
            outgoing = room.outgoing(place, count) if count else []
            for store, gathered, into in zip(parts_of_pages(layer), outgoing, landed, strict=False):
                torch.index_select(store, 0, seen.moving, out=gathered)
                event = stream.copy(into, gathered, label, direction=Direction.H2D)
            return stream.record() if event is None else event

        arrived = self._submit(self._reading, work)
        return CacheAhead(layer, room, place, seen, arrived)

    def attend(self, call: AttentionCall, ahead: CacheAhead, terms: AttentionTerms, index: int) -> torch.Tensor:
        """[1, T, heads, value_dim] on the device; starts copying new keys and values back to RAM.

        Raises:
            EngineError: the device failed.
        """
        device, pages, seen = self._device, ahead.room.pages, ahead.seen
        assert pages is not None
        compute, place = device.compute_stream, device.torch_device
        compute.wait(ahead.arrived.result())
        queries, keys, values = (
            states[0].transpose(0, 1).contiguous() for states in (call.queries, call.keys, call.values)
        )
        first, own = ahead.room.place(ahead.place), ahead.room.number_of(ahead.layer) * self.staying.count
        there = seen.rows.at(torch.where(seen.where >= 0, first + seen.where, own - 1 - seen.where))
        back = there.page[seen.back], there.slot[seen.back]
        page, slot = upload(torch.stack(back), place).unbind()
        found, packed = list[torch.Tensor](), list[torch.Tensor]()
        nbytes, flops = work_of(pages, terms, there)

        def work() -> None:
            found.append(self._paged.attend(pages, terms, there, queries, keys, values))
            if device.meter is not None:
                device.meter.kernel(nbytes, flops)
            if len(seen.back):
                packed.extend(part[page, :, slot] for part in parts_of_pages(pages))

        end = compute.submit(work, (lanes.ATTENTION, index, -1, 1))
        if self._costs.knows(Cost.CARD_ATTENTION):
            self._computed.append((nbytes, end))
        self._used[ahead.place] = end
        if not device.compute_follows_caller or not found:
            end.wait()
        if len(seen.back):
            device.d2h_stream.wait(end)
            self._submit(self._writing, lambda: self._store(ahead, end, packed, index))
        return found[0][None]

    def _store(self, ahead: CacheAhead, end: Event, packed: list[torch.Tensor], index: int) -> Event:
        """Brings new keys and values to their pages in RAM."""
        end.wait()
        event, landing = end, ahead.room.landing(len(ahead.seen.back))
        for landed, new in zip(landing, packed, strict=True):
            label = lanes.KEYS_VALUES, index, -1, 1
            event = self._device.d2h_stream.copy(landed, new, label, direction=Direction.D2H)
        event.wait()
        page, slot = (each[ahead.seen.back] for each in (ahead.seen.rows.page, ahead.seen.rows.slot))
        for into, landed in zip(parts_of_pages(ahead.layer), landing, strict=True):
            into[page, :, slot] = landed
        return event

    def settle(self) -> None:
        """Waits until no work is left, whether it succeeds or fails."""
        for future in self._under_way:
            with passed_over("Attention under way was given up"):
                future.result().wait()
        self._under_way, self._used, self._computed = [], [None] * _PLACES, []
        self._seen.clear()

    def finish(self) -> None:
        """Waits until all new keys and values are in RAM; rows must not advance before.

        Raises:
            EngineError: the device failed.
        """
        for future in self._under_way:
            future.result().wait()
        self._under_way = []
        self._seen.clear()
        for nbytes, end in self._computed:
            if end.done() and end.failure is None:
                self._costs.observe(Cost.CARD_ATTENTION, nbytes, end.ended_s - end.started_s)
        self._computed = []

    def forget(self) -> None:
        """Frees the device's pages, and what is in them."""
        for room in self._rooms.values():
            room.release()
        self._rooms, self.staying = {}, StayingPages()
        self._seen.clear()

    def close(self) -> None:
        """Ends the threads and frees the memory.  Safe to call twice."""
        self.settle()
        self._reading.shutdown()
        self._writing.shutdown()
        self.forget()

    def _room(self, layer: PagedLayer) -> _Room:
        return self._rooms.setdefault(layer.shape, _Room(self._device, layer))

    def _make_room(self, room: _Room, pages: int) -> None:
        """Room for so many pages of a micro-batch, beside those that stay."""
        if room.pages is not None and pages <= room.staged:
            return
        self._wait()
        before, staged = room.pages, room.staged
        held = [part.cpu() for part in parts_of_pages(before)] if before is not None else []
        try:
            room.make(room.staying, pages + pages // _SLACK if staged else pages)
        except DeviceMemoryError:
            try:
                if before is not None:
                    room.make(len(held[0]) - _PLACES * staged, staged)
                    room.put_back(held, staged)
            except DeviceMemoryError as taken:  # not even that: others have taken it, and the sweep begins anew
                room.bring_home(held, self.staying.numbers)
                self.leave()
                raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, str(taken)) from None
            raise
        room.put_back(held, staged)
        self._device.h2d_stream.wait(self._device.compute_stream.record())  # what was written here comes first

    def _wait(self) -> None:
        """Until nothing reads or writes the device's pages."""
        for future in self._under_way:
            future.result().wait()
        self._under_way = [future for future in self._under_way if not future.done()]
        self._device.compute_stream.synchronize()

    def _seen_by(self, pieces: Pieces, terms: AttentionTerms) -> _Seen:
        key = id(pieces), terms.window, terms.kept
        known = self._seen.get(key)
        if known is None:
            known = self._seen[key] = pieces, _seen(pieces, terms, self.staying)
        return known[1]

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[[], Event]) -> Future[Event]:
        def run() -> Event:
            with torch.inference_mode():
                return work()

        future = thread.submit(run)
        self._under_way.append(future)
        return future


GiveBack = Callable[[int, int], int]
"""Takes so many bytes of the card of this number from its experts; how many it got."""


class SharedAttention:
    """See `DeviceAttention`; over all cards, of which there may be one.

    Args:
        held: the cards, and the ways between them.
        costs: of each card, that are told how long it took.
    """

    def __init__(self, held: DeviceExperts, give_back: GiveBack, costs: Sequence[CostModel]) -> None:
        self._cards = [
            DeviceAttention(device, held.kernels, each) for device, each in zip(held.devices, costs, strict=True)
        ]
        self._devices, self._ways, self._give_back = held.devices, held.ways, give_back
        self._parts: dict[int, tuple[PagedLayer, list[PagedLayer]]] = {}
        self._terms: dict[tuple[int, int], tuple[AttentionTerms, AttentionTerms]] = {}

    @property
    def staying(self) -> StayingPages:
        """See `DeviceAttention`: of each page, each card has its own heads, until it has to give them up."""
        return max((card.staying for card in self._cards), key=lambda staying: staying.count)

    def keep(self, layers: Sequence[PagedLayer], staying: StayingPages, staged: int) -> None:
        """See `DeviceAttention.keep`; where one card has no room, none keeps any."""
        own: list[list[PagedLayer]] = [[] for _ in self._cards]
        for layer in layers:
            for parts, part in zip(own, self._parts_of(layer), strict=False):
                parts.append(part)
        try:
            for number, parts in enumerate(own):
                if parts:  # else there are fewer heads than cards
                    keep = partial(self._cards[number].keep, parts, staying, staged)
                    with_room(keep, partial(self._give_back, number))
        except DeviceMemoryError:
            for card in self._cards:
                card.forget()
            raise

    def leave(self) -> None:
        for card in self._cards:
            card.leave()
        self._parts.clear()

    def fetch(self, layer: PagedLayer, terms: AttentionTerms, pieces: Pieces, index: int) -> list[CacheAhead]:
        """See `DeviceAttention.fetch`: to all cards that have heads of this layer."""
        return [
            with_room(partial(card.fetch, part, terms, pieces, index), partial(self._give_back, number))
            for number, (card, part) in enumerate(zip(self._cards, self._parts_of(layer), strict=False))
        ]

    def attend(
        self, call: AttentionCall, ahead: Sequence[CacheAhead], terms: AttentionTerms, index: int
    ) -> torch.Tensor:
        group = call.queries.shape[1] // call.keys.shape[1]
        if len(ahead) == 1:
            return self._cards[0].attend(call, ahead[0], terms, index)
        heads = heads_of(call.keys.shape[1], len(self._cards))
        came, places = list[tuple[Ways, torch.Tensor, Event]](), list[range]()
        for number, own in enumerate(heads[1:], 1):
            ways, compute = self._ways[number - 1], self._devices[number].compute_stream
            mine = _part(call, own, group)
            states = (mine.queries, mine.keys, mine.values)
            there, arrived = ways.there.carry(torch.cat([each.reshape(-1) for each in states]))
            if self._devices[number].compute_follows_caller:
                compute.wait(arrived)
            else:  # what the caller does with them is done at once
                arrived.wait()
            sent = torch.split(there, [each.numel() for each in states])
            landed = (part.view(each.shape) for part, each in zip(sent, states, strict=True))
            given = AttentionCall(call.module, *landed)
            attended = self._cards[number].attend(given, ahead[number], self._terms_of(terms, own, group), index)
            ways.there.read_until(compute.record())
            came.append((ways, *ways.back.carry(attended.contiguous())))
            places.append(_queries(own, group))
        own = heads[0]
        first = self._cards[0].attend(_part(call, own, group), ahead[0], self._terms_of(terms, own, group), index)
        result = first.new_empty(1, first.shape[1], call.queries.shape[1], first.shape[3])

        def work() -> None:
            result[:, :, own.start * group : own.stop * group] = first
            for place, (_, landed, _) in zip(places, came, strict=True):
                result[:, :, place.start : place.stop] = landed

        joined(self._devices[0], came, work)
        return result

    def settle(self) -> None:
        for card in self._cards:
            card.settle()

    def finish(self) -> None:
        for card in self._cards:
            card.finish()

    def close(self) -> None:
        for card in self._cards:
            card.close()
        self._parts.clear()

    def _parts_of(self, layer: PagedLayer) -> list[PagedLayer]:
        """What each card has of a layer, the same object each time."""
        known = self._parts.get(id(layer))
        if known is None or known[0] is not layer:
            heads = heads_of(layer.shape.kv_heads, len(self._cards))
            parts = [layer.of_heads(own) for own in heads] if len(heads) > 1 else [layer]
            self._parts[id(layer)] = known = layer, parts
        return known[1]

    def _terms_of(self, terms: AttentionTerms, own: range, group: int) -> AttentionTerms:
        """Of a card's own heads, the same object each time."""
        if terms.sinks is None:
            return terms
        known = self._terms.get((id(terms), own.start))
        if known is None or known[0] is not terms:
            place = _queries(own, group)
            its = replace(terms, sinks=terms.sinks[place.start : place.stop])
            self._terms[id(terms), own.start] = known = terms, its
        return known[1]


def heads_of(kv_heads: int, cards: int) -> tuple[range, ...]:
    """Heads of keys and values of each card that has any; the others have none."""
    return expert_ranges(kv_heads, [1] * min(kv_heads, cards))


def _queries(own: range, group: int) -> range:
    return range(own.start * group, own.stop * group)


def _part(call: AttentionCall, own: range, group: int) -> AttentionCall:
    place = _queries(own, group)
    return AttentionCall(
        call.module,
        call.queries[:, place.start : place.stop],
        call.keys[:, own.start : own.stop],
        call.values[:, own.start : own.stop],
    )


def _seen(pieces: Pieces, terms: AttentionTerms, staying: StayingPages) -> _Seen:
    rows = PlacedRows(pieces)
    place = torch.arange(rows.pages.shape[1])
    sees = place < -(-rows.end // PAGE_TOKENS)[:, None]
    if terms.window:
        oldest = (rows.held + 1 - terms.window).clamp(min=0) // PAGE_TOKENS
        sees &= (place >= oldest[:, None]) | (place < -(-terms.kept // PAGE_TOKENS))
    of_seen, where = torch.unique(rows.pages[sees], return_inverse=True)
    holds = sees & (place < -(-rows.held // PAGE_TOKENS)[:, None])
    index = staying.index(of_seen)
    in_ram = index < 0
    moves = in_ram & torch.isin(of_seen, rows.pages[holds])
    is_new, moving = in_ram & ~moves, of_seen[moves]
    numbers = torch.where(
        moves, moves.cumsum(0) - 1, torch.where(is_new, len(moving) + is_new.cumsum(0) - 1, -1 - index)
    )
    # Pages that nobody sees: any that there is will do.
    placed = torch.full_like(rows.pages, 0 if in_ram.any() else -1)
    placed[sees] = numbers[where]
    back = (staying.index(rows.page) < 0).nonzero()[:, 0]
    return _Seen(rows, moving, int(in_ram.sum()), placed, back)


def _parts_in(memory: torch.Tensor, like: PagedLayer, pages: int) -> list[torch.Tensor]:
    """Keys, values and what else such pages have, so many of each, in this memory."""
    parts = parts_of_pages(like)
    return _views(memory, [(pages, *part.shape[1:]) for part in parts], [part.dtype for part in parts])


def _views(
    memory: torch.Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    views, begin = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = begin + math.prod(shape) * dtype.itemsize
        views.append(memory[begin:end].view(dtype).view(shape))
        begin = end
    return views
