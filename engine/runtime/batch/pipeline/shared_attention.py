"""Attention on the cards: each has some heads of keys and values, and the queries that belong to them.

Keys and values cross the links of all cards at once.  Queries and new keys and values are the first card's, which sends
each card its part and puts what comes back side by side (tensor parallelism, as MoE-Lightning does it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.common.costs import CostModel
from engine.devices.device import Event
from engine.devices.memory_budget import DeviceMemoryError
from engine.experts.shared import Ways
from engine.kernels.native.paged_attention import AttentionTerms, PagedLayer, Pieces
from engine.planner.placement import expert_ranges
from engine.runtime.batch.pipeline.device_attention import CacheAhead, DeviceAttention, StayingPages
from engine.runtime.batch.pipeline.layer_experts import with_room
from engine.runtime.batch.pipeline.layer_run import AttentionCall
from engine.runtime.load.devices import DeviceExperts

GiveBack = Callable[[int, int], int]
"""Takes so many bytes of the card of this number from its experts; how many it got."""


@dataclass(frozen=True)
class SharedCache:
    """Keys and values of a micro-batch on their way to all cards that have heads of this layer."""

    parts: tuple[CacheAhead, ...]
    heads: tuple[range, ...]


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

    def fetch(self, layer: PagedLayer, terms: AttentionTerms, pieces: Pieces, index: int) -> SharedCache:
        parts = [
            with_room(partial(card.fetch, part, terms, pieces, index), partial(self._give_back, number))
            for number, (card, part) in enumerate(zip(self._cards, self._parts_of(layer), strict=False))
        ]
        return SharedCache(tuple(parts), heads_of(layer.shape.kv_heads, len(self._cards)))

    def attend(self, call: AttentionCall, ahead: SharedCache, terms: AttentionTerms, index: int) -> torch.Tensor:
        group = call.queries.shape[1] // call.keys.shape[1]
        if len(ahead.parts) == 1:
            return self._cards[0].attend(call, ahead.parts[0], terms, index)
        came: list[tuple[range, Ways, torch.Tensor, Event]] = []
        for number, own in enumerate(ahead.heads[1:], 1):
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
            attended = self._cards[number].attend(given, ahead.parts[number], self._terms_of(terms, own, group), index)
            ways.there.read_until(compute.record())
            came.append((_queries(own, group), ways, *ways.back.carry(attended.contiguous())))
        own = ahead.heads[0]
        first = self._cards[0].attend(_part(call, own, group), ahead.parts[0], self._terms_of(terms, own, group), index)
        return self._side_by_side(first, _queries(own, group), came, call.queries.shape[1])

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

    def _side_by_side(
        self, first: torch.Tensor, own: range, came: Sequence[tuple[range, Ways, torch.Tensor, Event]], heads: int
    ) -> torch.Tensor:
        device = self._devices[0]
        result = first.new_empty(1, first.shape[1], heads, first.shape[3])
        for *_, arrived in came:
            device.compute_stream.wait(arrived)

        def work() -> None:
            result[:, :, own.start : own.stop] = first
            for place, _, landed, _ in came:
                result[:, :, place.start : place.stop] = landed

        end = device.compute_stream.submit(work)
        for _, ways, _, _ in came:
            ways.back.read_until(end)
        if not device.compute_follows_caller:
            end.wait()
        return result


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
