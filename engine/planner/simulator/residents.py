"""Experts on the card: arrival times and eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.planner.memory import indexes
from engine.planner.simulator.strategy import Residency


class SimulatedResidents:
    """State of the card's expert slots.

    Each layer has its own set, least recently used first, with each expert's arrival time.

    Args:
        shares: popularity, [layers, experts].
        slots: experts that fit on the card.
        ways: ways of each index of a cache.
    """

    def __init__(self, residency: Residency, shares: NDArray[np.float64], slots: int, ways: int) -> None:
        layers, experts = shares.shape
        self.capacity = [0] * layers
        self.changes = residency is Residency.CACHE
        chosen: list[list[int]] = [[] for _ in range(layers)]
        if residency is Residency.LAYERS:
            for layer in range(min(slots // experts, layers)):
                chosen[layer] = list(range(experts))
        elif residency is Residency.STATIC:
            order = np.argsort(-shares, axis=None, kind="stable")[:slots]
            for index in order:
                chosen[int(index) // experts].append(int(index) % experts)
        elif residency is Residency.CACHE:
            for layer in range(indexes(slots, ways, layers)):
                chosen[layer] = [int(expert) for expert in np.argsort(shares[layer], kind="stable")[-ways:]]
        self.arrivals: list[OrderedDict[int, float]] = [OrderedDict.fromkeys(ids, 0.0) for ids in chosen]
        self.capacity = [len(ids) for ids in chosen]

    def arrival(self, layer: int, expert: int) -> float | None:
        """When it arrived or will arrive; None if it is neither on the card nor in transfer."""
        return self.arrivals[layer].get(expert)

    def touch(self, layer: int, experts: Sequence[int]) -> None:
        """Marks these experts as just used."""
        held = self.arrivals[layer]
        for expert in experts:
            if expert in held:
                held.move_to_end(expert)

    def can_admit(self, layer: int, in_use: Container[int], now: float) -> bool:
        """Whether the layer has an expert that can be evicted: neither in use nor in transfer."""
        if not self.changes or not self.capacity[layer]:
            return False
        return any(expert not in in_use and there <= now for expert, there in self.arrivals[layer].items())

    def admit(self, layer: int, expert: int, arrival: float, in_use: Container[int], now: float) -> None:
        """Replaces the least recently used expert that is neither in use nor in transfer."""
        held = self.arrivals[layer]
        leaving = next(other for other, there in held.items() if other not in in_use and there <= now)
        del held[leaving]
        held[expert] = arrival
