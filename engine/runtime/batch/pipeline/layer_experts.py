"""Transfers layers' experts to a device and computes them there, as schedules request.

Experts that stay on the device from sweep to sweep (MoE-Lightning's r_w, Klotski's tensor placement).

They use the slots of the expert cache, and need not cross the link: as many of each layer as a plan says, which are
there before the first sweep, or what the pipeline's buffers leave of the cache.  Free slots are filled during sweeps,
with the experts that get the most tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from engine.common.costs import Cost, CostModel
from engine.common.errors import EngineError
from engine.common.falls import FALLS
from engine.devices.device import CopyRecord, Direction, Event
from engine.devices.memory_budget import DeviceMemoryError, with_room
from engine.experts.dispatch import BANK_LAYER, compute_experts
from engine.experts.dispatcher import HybridExperts
from engine.experts.executor import PartialSums, Routing
from engine.experts.misses import MIXED
from engine.experts.prediction.predictors import BatchCorrelation
from engine.experts.shared import Part, SharedExperts, Ways, joined, parts_of
from engine.experts.vram_cache import Lookup
from engine.experts.whole_layer import Half, LayerBuffers
from engine.kernels.interface import ExpertKernel
from engine.runtime.batch.layers import DecoderLayers
from engine.runtime.batch.pipeline.layer_run import ExpertsCall
from engine.runtime.load.devices import DeviceExperts
from engine.telemetry import lanes


@dataclass(frozen=True, slots=True)
class Resident:
    """A layer's experts in the cache, pinned until `Residents.release`.

    Attributes:
        slots: expert -> its slot in the cache.
        numbers: [experts + 1] on the device, the slot of each expert; `absent` for those not in the cache and for the
            extra last entry.
        kernel: computes experts in slots.
    """

    lookup: Lookup
    numbers: torch.Tensor
    absent: int
    kernel: ExpertKernel

    @property
    def slots(self) -> dict[int, int]:
        return self.lookup.hits


class Residents:
    """The cached experts of each layer.  For a single thread.

    Args:
        layers: layers in the order of the pipeline's buffers.
        likeliest: (layer, count) -> the experts that are expected to get the most tokens.
    """

    def __init__(self, layers: Sequence[HybridExperts], likeliest: Callable[[int, int], Sequence[int]]) -> None:
        self._layers, self._likeliest = layers, likeliest
        self._held: dict[int, Resident | None] = {}

    def of(self, number: int) -> Resident | None:
        """The cached experts of a layer, unchanged until `release`; None if there are none."""
        if number not in self._held:
            self._held[number] = self._hold(number)
        return self._held[number]

    def fill(self) -> None:
        """Fills the free slots of all layers and waits until their experts are there."""
        for number, experts in enumerate(self._layers):
            left, room = 0, self._fill(number)
            while room and room != left:
                experts.cache.wait()
                left, room = room, self._fill(number)
            experts.cache.wait()

    def release(self, number: int, last_use: Event | None) -> None:
        """Makes them evictable after `last_use`, the end of all work on them, and fills free slots."""
        held = self._held.pop(number, None)
        if held is not None:
            self._layers[number].cache.release(held.lookup, last_use)
        self._fill(number)

    def release_all(self) -> None:
        """The same for all layers, once no work is in flight."""
        for number in list(self._held):
            held = self._held.pop(number)
            if held is not None:
                with contextlib.suppress(EngineError):
                    self._layers[number].cache.release(held.lookup)

    def _hold(self, number: int) -> Resident | None:
        experts = self._layers[number]
        count, cache = experts.source.num_experts, experts.cache
        if not cache.slots:
            return None
        lookup = cache.hold(experts.layer, range(count))
        if not lookup.hits:
            return None
        numbers = torch.full((count + 1,), cache.slots)
        for expert, slot in lookup.hits.items():
            numbers[expert] = slot
        placed = numbers.to(cache.device.torch_device)
        return Resident(lookup, placed, cache.slots, cache.kernel(experts.make_kernel))

    def _fill(self, number: int) -> int:
        """Fills free slots up to this layer's share with its missing experts; returns how many are left."""
        experts = self._layers[number]
        cache, layer = experts.cache, experts.layer
        sharing = sum(other.cache is cache for other in self._layers)
        share = -(-cache.slots // sharing) if cache.slots else 0
        room = min(share - len(cache.residents(layer)), cache.free_slots(layer))
        if room <= 0:
            return 0
        likeliest = self._likeliest(number, min(share, experts.source.num_experts))
        for expert in cache.absent(layer, likeliest)[:room]:
            if not cache.prefetch(layer, expert, experts.source):
                break
            room -= 1
        return room


_NEARLY_ALL = 0.95
_TIMED_EXPERTS = 4
"""Of a layer: asking a card about more would cost time."""


@dataclass(frozen=True, slots=True)
class Site:
    """An experts module and its number in the buffers."""

    number: int
    experts: HybridExperts


class LayerExperts:
    """Two layer buffers on a device, filled in turn, next to the experts that stay in its cache.

    The buffers take their memory from the expert caches and return it at the end.

    Args:
        held: the expert caches of all devices.
        resident: r_w, the share of each layer's experts that stays in the cache; None for what there is memory for.
        card: the index of this device.

    Attributes:
        sites: experts modules by identity.
        most: most experts of any layer.

    Raises:
        LookupError: the model's experts are not loaded to a device, layer by layer.
        DeviceMemoryError: the device has no room for two layers.
    """

    def __init__(
        self,
        held: DeviceExperts,
        layers: DecoderLayers,
        per_token: int,
        resident: float | None = None,
        card: int = 0,
    ) -> None:
        self.device = device = held.devices[card]
        self._held, self._per_token, self._card = held, per_token, card
        self.sites, self._first_of = sites_of(layers, card)
        modules = [site.experts for site in self.sites.values()]
        layouts = {experts.cache.layout for experts in modules}
        if any(experts.mode != MIXED for experts in modules):
            raise LookupError(f"misses are served by one way alone ({modules[0].mode})")
        if len(layouts) != 1:
            raise LookupError("its layers' experts differ from each other")
        layout, self.most = layouts.pop(), max(experts.source.num_experts for experts in modules)
        try:
            if resident is not None:
                wanted = round(resident * self.most) * len(modules)
                self._say_how_many_stay(sum(cache.remake(wanted) for cache in held.caches[card]), wanted)
            missing = 2 * self.most * layout.nbytes - device.memory.free
            if missing > 0:
                held.give_back(card, missing)
            self._buffers = LayerBuffers(device, layout, [experts.source for experts in modules])
        except DeviceMemoryError:
            held.take_back()
            raise
        self._buffers.layer_numbers = [index for index, number in enumerate(self._first_of) if number is not None]
        self._whole = True
        self._latency, self._record_nbytes = modules[0].latency, layout.nbytes
        self._not_told = device.copy_log.listen(self._copied)
        self._routing: tuple[Sequence[ExpertsCall], Routing] | None = None
        self._computed: list[tuple[int, Event]] = []
        self._uses = BatchCorrelation(len(modules), self.most)
        self._ends: dict[int, Event] = {}
        """End of the last computation issued for each layer in flight."""
        self._residents = Residents(modules, self._uses.hot)
        self._awaits_residents = resident is not None

    @property
    def costs(self) -> CostModel:
        """What the run finds of this card."""
        return self._latency.costs

    def _copied(self, copy: CopyRecord) -> None:
        if copy.direction == Direction.H2D and copy.nbytes >= self._record_nbytes:
            self._latency.costs.observe(Cost.H2D, copy.nbytes, copy.ended_s - copy.started_s)

    def begin(self, *, whole: bool) -> None:
        """Before a sweep: those experts that are planned to stay are there, or as many as have room.

        Args:
            whole: whether a layer is computed once it is complete; else once the experts it uses are there.
        """
        self._whole = whole
        if self._awaits_residents:
            self._residents.fill()
            self._awaits_residents = False

    def bring_page(self, index: int, page: int, pages: int) -> None:
        """Starts the transfer of one of `pages` pages of the experts of the layer after this one."""
        self.bring_layer(index)
        number = self._next(index)
        if number != self._first_of[index]:
            missing = self._missing(number, range(self._buffers.experts_of(number)))
            first, behind = (place * len(missing) // pages for place in (page, page + 1))
            self._buffers.bring(self._buffers.begin(number), missing[first:behind])

    def bring_layer(self, index: int) -> None:
        own = self._first_of[index]
        if own is not None:
            self._bring_all(own)

    def bring_hot(self, index: int, *, of_next: bool) -> None:
        number = self._next(index) if of_next else self._first_of[index]
        if number is not None:
            half, there = self._buffers.begin(number), self._buffers.experts_of(number)
            hot = [expert for expert in self._uses.hot(number, self._per_token) if expert < there]
            self._buffers.bring(half, self._missing(number, hot))

    def bring_wanted(self, calls: Sequence[ExpertsCall]) -> None:
        for number, routing in self._routings(calls):
            self._uses.observe(number, routing.index.numpy())
            self._note_distinct(routing, self._buffers.experts_of(number))
            wanted = sorted(routing.experts, key=lambda expert: -routing.tokens(expert))
            self._buffers.bring(self._buffers.begin(number), self._missing(number, wanted))

    def compute(self, call: ExpertsCall) -> torch.Tensor:
        """The output of a layer's experts for a micro-batch, once all of them are there."""
        site = self.sites.get(id(call.module))
        if site is None or not call.index.numel():
            return compute_experts(call.module, call.hidden, call.index, call.weights)
        half = self._bring_all(site.number) if self._whole else self._buffers.begin(site.number)
        make_kernel, index = site.experts.make_kernel, call.index
        resident = self._residents.of(site.number)
        if resident is None:
            result, end = self._buffers.compute(half, make_kernel, call.hidden, index, call.weights)
        else:
            slots = resident.numbers[index.clamp(max=len(resident.numbers) - 1)]
            elsewhere = index.masked_fill(slots < resident.absent, self.most)
            result, _ = self._buffers.compute(half, make_kernel, call.hidden, elsewhere, call.weights)
            kernel = resident.kernel

            def work() -> None:
                result.add_(kernel(call.hidden, slots, call.weights))

            half.last_use = end = self.device.compute_stream.submit(work)
        self._ends[site.number] = end
        if not self.device.compute_follows_caller:
            end.wait()
        return result

    def compute_together(self, calls: Sequence[ExpertsCall]) -> list[torch.Tensor]:
        """The output of one layer's experts for each call: residents first, then the others as they arrive."""
        ((number, routing),) = self._routings(calls)
        site = self.sites[id(calls[0].module)]
        hidden, weights = (torch.cat([getattr(call, name) for call in calls]) for name in ("hidden", "weights"))
        sums, compute = PartialSums(hidden, weights, routing, self._rows(weights, hidden)), self.device.compute_stream
        half, resident = self._buffers.begin(number), self._residents.of(number)
        if resident is not None and (there := {e: slot for e, slot in resident.slots.items() if e in routing.visits}):
            compute.submit(sums.on_device(resident.kernel, there), (lanes.EXPERTS, None, -1, 1))
        kernel = half.segment.kernel(site.experts.make_kernel)
        for expert, arrived in half.copied.items():
            if expert in routing.visits:
                compute.wait(arrived)
                done = compute.submit(sums.on_device(kernel, {expert: expert}), (lanes.EXPERTS, None, expert, 1))
                if len(self._computed) < _TIMED_EXPERTS:
                    self._computed.append((routing.tokens(expert), done))
        half.last_use = self._ends[number] = end = compute.submit(sums.finish())
        if not self.device.compute_follows_caller:
            end.wait()
        return list(torch.split(sums.result, [len(call.hidden) for call in calls]))

    def _note_distinct(self, routing: Routing, experts: int) -> None:
        """How far routing is from even, where not nearly all experts are used anyway."""
        tokens = len(routing.index)
        here = routing.index.numel() - len(routing.absent)
        even = experts * (1 - (1 - here / (tokens * experts)) ** tokens) if tokens else 0.0
        if 0 < even < _NEARLY_ALL * experts:
            self._latency.costs.observe(Cost.DISTINCT, 1, len(routing.experts) / even)

    def leave(self, index: int) -> None:
        """Ends a layer: its residents may be replaced."""
        self._routing = None
        for tokens, done in (each for each in self._computed if each[1].done() and each[1].failure is None):
            self._latency.observe_gpu([tokens], done.ended_s - done.started_s)
        self._computed = [each for each in self._computed if not each[1].done()]
        number = self._first_of[index]
        if number is not None:
            self._residents.release(number, self._ends.pop(number, None))

    def give_back(self, nbytes: int) -> int:
        """Takes device memory from the cache, including residents; returns the bytes freed."""
        self.device.compute_stream.synchronize()
        self._residents.release_all()
        return self._held.give_back(self._card, nbytes)

    def forget(self) -> None:
        """Drops all state after a failure or an abandoned sweep, once the streams have recovered."""
        self._routing, self._computed = None, []
        self._ends = {}
        self._residents.release_all()
        self._buffers.forget()

    def close(self) -> None:
        """Returns all memory.  Safe to call twice."""
        self._not_told()
        self._residents.release_all()
        self._buffers.close()
        self._held.take_back()

    def _bring_all(self, number: int) -> Half:
        half = self._buffers.begin(number)
        try:
            self._buffers.bring(half, self._missing(number, range(self._buffers.experts_of(number))))
        except BaseException:
            half.layer = None  # not all of its copies were started
            raise
        return half

    def _missing(self, number: int, experts: Sequence[int]) -> Sequence[int]:
        """The experts that do not stay on the device."""
        resident = self._residents.of(number)
        return experts if resident is None else [expert for expert in experts if expert not in resident.slots]

    def _say_how_many_stay(self, count: int, wanted: int) -> None:
        what = f"Keeping the planned number of experts on {self.device.name}"
        if count < wanted:
            FALLS.say(what, f"keeping {count} of {wanted}", "there is no room for more")
        else:
            FALLS.is_over(what)

    def _rows(self, weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        shape, rows = (weights.numel(), hidden.shape[1]), self._held.activations[self._card].rows
        return with_room(lambda: rows(shape, hidden.dtype), self.give_back)

    def _routings(self, calls: Sequence[ExpertsCall]) -> list[tuple[int, Routing]]:
        """(number of the site, which tokens use which expert) of calls of one layer; empty without calls."""
        if not calls or id(calls[0].module) not in self.sites:
            return []
        number = self.sites[id(calls[0].module)].number
        known = self._routing
        if known is None or len(known[0]) != len(calls) or known[0][0] is not calls[0]:
            index = torch.cat([call.index for call in calls]).cpu()
            self._routing = known = calls, Routing(index, self._buffers.experts_of(number))
        return [(number, known[1])]

    def _next(self, index: int) -> int:
        cycle = (*self._first_of[index + 1 :], *self._first_of[: index + 1])
        return next(number for number in cycle if number is not None)


def sites_of(layers: DecoderLayers, card: int = 0) -> tuple[dict[int, Site], list[int | None]]:
    """(experts modules by identity, number of each layer's experts if it has any)."""
    sites: dict[int, Site] = {}
    first_of: list[int | None] = []
    for index in range(len(layers)):
        found = [
            (module, module.__dict__[BANK_LAYER][1])
            for module in layers[index].modules()
            if BANK_LAYER in module.__dict__
        ]
        first_of.append(len(sites) if found else None)
        if len(found) > 1:
            raise LookupError("a layer has several sets of experts")
        for module, experts in found:
            parts = parts_of(experts)
            if len(parts) <= card:
                raise LookupError("its experts are not loaded to a device")
            sites[id(module)] = Site(len(sites), parts[card])
    if not sites:
        raise LookupError("it has no experts")
    return sites, first_of


@dataclass(frozen=True)
class _Card:
    """One of the cards.

    Attributes:
        ways: from the first card and back; None for the first.
    """

    experts: LayerExperts
    ways: Ways | None


class SharedLayerExperts:
    """See `LayerExperts`; of all cards together, of which there may be one.

    Raises:
        LookupError: the layers' experts are not shared by all devices.
        DeviceMemoryError: a device has no room for two layers.
    """

    def __init__(
        self, held: DeviceExperts, layers: DecoderLayers, per_token: int, resident: float | None = None
    ) -> None:
        with ExitStack() as opened:
            self.cards: list[_Card] = []
            for number, ways in enumerate([None, *held.ways]):
                experts = LayerExperts(held, layers, per_token, resident, number)
                opened.callback(experts.close)
                self.cards.append(_Card(experts, ways))
            if len(self.cards) != len(held.devices):
                raise LookupError("its experts are not shared by all cards")
            opened.pop_all()
        self.most = sum(card.experts.most for card in self.cards)

    @property
    def costs(self) -> list[CostModel]:
        """See `LayerExperts.costs`: of each card."""
        return [card.experts.costs for card in self.cards]

    def each(self, do: Callable[[LayerExperts], object]) -> None:
        """Has each card do its part."""
        for card in self.cards:
            do(card.experts)

    def bring_wanted(self, calls: Sequence[ExpertsCall]) -> None:
        for number, card in enumerate(self.cards):
            card.experts.bring_wanted([self._of(number, call) for call in calls])

    def compute(self, call: ExpertsCall) -> torch.Tensor:
        if len(self.cards) == 1:
            return self.cards[0].experts.compute(call)
        if not call.index.numel() or self._part(0, call.module) is None:
            return compute_experts(call.module, call.hidden, call.index, call.weights)
        return self._added(call.hidden, lambda card, hidden: card.compute(self._there(card, call, hidden)))

    def compute_together(self, calls: Sequence[ExpertsCall]) -> list[torch.Tensor]:
        if len(self.cards) == 1:
            return self.cards[0].experts.compute_together(calls)
        sizes = [len(call.hidden) for call in calls]

        def computed(card: LayerExperts, hidden: torch.Tensor) -> torch.Tensor:
            rows = torch.split(hidden, sizes)
            mine = [self._there(card, call, some) for call, some in zip(calls, rows, strict=True)]
            return torch.cat(card.compute_together(mine))

        return list(torch.split(self._added(torch.cat([call.hidden for call in calls]), computed), sizes))

    def compute_in_ram(self, call: ExpertsCall) -> torch.Tensor:
        experts = call.module.__dict__.get(BANK_LAYER, (None, None))[1]
        if not isinstance(experts, SharedExperts | HybridExperts):
            return compute_experts(call.module, call.hidden, call.index, call.weights)
        return experts.with_misses_on_cpu(call.hidden, call.index, call.weights)

    def give_back(self, nbytes: int) -> int:
        """See `LayerExperts.give_back`: of the first card, which has all else."""
        return self.give_back_of(0, nbytes)

    def give_back_of(self, number: int, nbytes: int) -> int:
        """The same of the card of this number."""
        return self.cards[number].experts.give_back(nbytes)

    def forget(self) -> None:
        for card in self.cards:
            card.experts.forget()
            if card.ways is not None:
                card.ways.forget()

    def _part(self, number: int, module: Any) -> Part | None:
        shared = module.__dict__.get(BANK_LAYER, (None, None))[1]
        return shared.parts[number] if isinstance(shared, SharedExperts) else None

    def _of(self, number: int, call: ExpertsCall) -> ExpertsCall:
        """The call by a card's own numbers; experts of others are none of its."""
        part = self._part(number, call.module)
        if part is None:
            return call
        mine = call.index - part.own.start
        none_of_its = self.cards[number].experts.most
        return replace(call, index=mine.masked_fill((mine < 0) | (mine >= len(part.own)), none_of_its))

    def _there(self, card: LayerExperts, call: ExpertsCall, hidden: torch.Tensor) -> ExpertsCall:
        """The call on a card, whose rows are there."""
        number = next(number for number, each in enumerate(self.cards) if each.experts is card)
        mine, place = self._of(number, call), card.device.torch_device
        index, weights = (tensor.to(place, non_blocking=True) for tensor in (mine.index, call.weights))
        return ExpertsCall(call.module, hidden, index, weights)

    def _added(
        self, hidden: torch.Tensor, compute: Callable[[LayerExperts, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What each card computes of these rows, added up on the first."""
        home, came = self.cards[0].experts, list[tuple[Ways, torch.Tensor, Event]]()
        hidden = hidden.contiguous()
        for card in self.cards[1:]:
            assert card.ways is not None
            there, arrived = with_room(partial(card.ways.there.carry, hidden), card.experts.give_back)
            if card.experts.device.compute_follows_caller:
                card.experts.device.compute_stream.wait(arrived)
            else:  # what the caller does with the rows is done at once
                arrived.wait()
            result = compute(card.experts, there)
            card.ways.there.read_until(card.experts.device.compute_stream.record())
            came.append((card.ways, *with_room(partial(card.ways.back.carry, result), home.give_back)))
        total = compute(home, hidden)

        def work() -> None:
            summed = total.float()
            for _, landed, _ in came:
                summed.add_(landed)
            total.copy_(summed)

        joined(home.device, came, work)
        return total
