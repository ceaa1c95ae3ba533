"""Layers' experts on several cards: each brings and computes those that it has, over a link of its own.

Everything but experts is on the first card, which sends rows to the others and adds what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.common.costs import CostModel
from engine.devices.device import Event
from engine.devices.memory_budget import DeviceMemoryError
from engine.experts.dispatch import BANK_LAYER, compute_experts
from engine.experts.shared import Part, SharedExperts, Ways
from engine.runtime.batch.layers import DecoderLayers
from engine.runtime.batch.pipeline.layer_experts import LayerExperts
from engine.runtime.batch.pipeline.layer_run import ExpertsCall
from engine.runtime.load.devices import DeviceExperts


@dataclass(frozen=True)
class _Card:
    """One of the cards.

    Attributes:
        ways: from the first card and back; None for the first.
    """

    experts: LayerExperts
    ways: Ways | None


class SharedLayerExperts:
    """See `LayerExperts`; of all cards together.

    Raises:
        LookupError: the layers' experts are not shared by all devices.
        DeviceMemoryError: a device has no room for two layers.
    """

    def __init__(
        self, held: DeviceExperts, layers: DecoderLayers, per_token: int, resident: float | None = None
    ) -> None:
        with ExitStack() as opened:
            self._cards: list[_Card] = []
            for number, ways in enumerate([None, *held.ways]):
                experts = LayerExperts(held, layers, per_token, resident, number)
                opened.callback(experts.close)
                self._cards.append(_Card(experts, ways))
            if len(self._cards) != len(held.devices):
                raise LookupError("its experts are not shared by all cards")
            opened.pop_all()
        self.most = sum(card.experts.most for card in self._cards)

    @property
    def costs(self) -> list[CostModel]:
        """See `LayerExperts.costs`: of each card."""
        return [card.experts.costs for card in self._cards]

    @property
    def whole(self) -> bool:
        return self._cards[0].experts.whole

    @whole.setter
    def whole(self, is_whole: bool) -> None:
        for card in self._cards:
            card.experts.whole = is_whole

    def begin(self) -> None:
        self._all(lambda each: each.begin())

    def load(self, index: int) -> bool:
        self._all(lambda each: each.bring_layer(index))
        return any(self._all(lambda each: each.load(index)))

    def bring_page(self, index: int, page: int, pages: int) -> None:
        self._all(lambda each: each.bring_page(index, page, pages))

    def bring_layer(self, index: int) -> None:
        self._all(lambda each: each.bring_layer(index))

    def bring_hot(self, index: int, *, of_next: bool) -> None:
        self._all(lambda each: each.bring_hot(index, of_next=of_next))

    def bring_wanted(self, calls: Sequence[ExpertsCall]) -> None:
        for number, card in enumerate(self._cards):
            card.experts.bring_wanted([self._of(number, call) for call in calls])

    def compute(self, call: ExpertsCall) -> torch.Tensor:
        if not call.index.numel() or self._part(0, call.module) is None:
            return compute_experts(call.module, call.hidden, call.index, call.weights)
        return self._added(call.hidden, lambda card, hidden: card.compute(self._there(card, call, hidden)))

    def compute_together(self, calls: Sequence[ExpertsCall]) -> list[torch.Tensor]:
        sizes = [len(call.hidden) for call in calls]

        def computed(card: LayerExperts, hidden: torch.Tensor) -> torch.Tensor:
            rows = torch.split(hidden, sizes)
            mine = [self._there(card, call, some) for call, some in zip(calls, rows, strict=True)]
            return torch.cat(card.compute_together(mine))

        return list(torch.split(self._added(torch.cat([call.hidden for call in calls]), computed), sizes))

    def compute_in_ram(self, call: ExpertsCall) -> torch.Tensor:
        shared = call.module.__dict__.get(BANK_LAYER, (None, None))[1]
        if not isinstance(shared, SharedExperts):
            return compute_experts(call.module, call.hidden, call.index, call.weights)
        return shared.with_misses_on_cpu(call.hidden, call.index, call.weights)

    def leave(self, index: int) -> None:
        self._all(lambda each: each.leave(index))

    def give_back(self, nbytes: int) -> int:
        """See `LayerExperts.give_back`: of the first card, which has all else."""
        return self.give_back_of(0, nbytes)

    def give_back_of(self, number: int, nbytes: int) -> int:
        """The same of the card of this number."""
        return self._cards[number].experts.give_back(nbytes)

    def forget(self) -> None:
        for card in self._cards:
            card.experts.forget()
            if card.ways is not None:
                card.ways.forget()

    def close(self) -> None:
        self._all(lambda each: each.close())

    def _all(self, do: Callable[[LayerExperts], Any]) -> list[Any]:
        return [do(card.experts) for card in self._cards]

    def _part(self, number: int, module: Any) -> Part | None:
        shared = module.__dict__.get(BANK_LAYER, (None, None))[1]
        return shared.parts[number] if isinstance(shared, SharedExperts) else None

    def _of(self, number: int, call: ExpertsCall) -> ExpertsCall:
        """The call by a card's own numbers; experts of others are none of its."""
        part = self._part(number, call.module)
        if part is None:
            return call
        mine = call.index - part.own.start
        none_of_its = self._cards[number].experts.most
        return replace(call, index=mine.masked_fill((mine < 0) | (mine >= len(part.own)), none_of_its))

    def _there(self, card: LayerExperts, call: ExpertsCall, hidden: torch.Tensor) -> ExpertsCall:
        """The call on a card, whose rows are there."""
        number = next(number for number, each in enumerate(self._cards) if each.experts is card)
        mine, place = self._of(number, call), card.device.torch_device
        index, weights = (tensor.to(place, non_blocking=True) for tensor in (mine.index, call.weights))
        return ExpertsCall(call.module, hidden, index, weights)

    def _added(
        self, hidden: torch.Tensor, compute: Callable[[LayerExperts, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What each card computes of these rows, added up on the first."""
        home, came = self._cards[0].experts, list[tuple[Ways, torch.Tensor, Event]]()
        hidden = hidden.contiguous()
        for card in self._cards[1:]:
            assert card.ways is not None
            there, arrived = self._carried(card.ways.there.carry, hidden, card.experts)
            if card.experts.device.compute_follows_caller:
                card.experts.device.compute_stream.wait(arrived)
            else:  # what the caller does with the rows is done at once
                arrived.wait()
            result = compute(card.experts, there)
            card.ways.there.read_until(card.experts.device.compute_stream.record())
            came.append((card.ways, *self._carried(card.ways.back.carry, result, home)))
        total = compute(home, hidden)
        stream = home.device.compute_stream
        for _, _, arrived in came:
            stream.wait(arrived)

        def work() -> None:
            summed = total.float()
            for _, landed, _ in came:
                summed.add_(landed)
            total.copy_(summed)

        end = stream.submit(work)
        for ways, _, _ in came:
            ways.back.read_until(end)
        if not home.device.compute_follows_caller:
            end.wait()
        return total

    @staticmethod
    def _carried(
        carry: Callable[[torch.Tensor], tuple[torch.Tensor, Event]], tensor: torch.Tensor, there: LayerExperts
    ) -> tuple[torch.Tensor, Event]:
        try:
            return carry(tensor)
        except DeviceMemoryError as refused:
            if not there.give_back(refused.asked):
                raise
        return carry(tensor)
