"""A tier of expert slots whose copies and computations take time on a clock that only the test moves."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from engine.experts.cache.policies import Pool, make_policy
from engine.experts.prediction.target import PrefetchTimes

RECORD = 1000


class SlotsInTime:
    """A `PrefetchTarget` and the steps that use it.

    A layer's misses cost `miss_s` each, hits nothing; a miss is post-fetched, behind what is on its way.

    Attributes:
        now_s: its clock.
        offered: (layer, expert) that were read from what a prefetch said was dead.
    """

    def __init__(
        self, slots: int, experts: int, *, arrival_s: float, miss_s: float, layer_s: float = 1e-3, policy: str = "lru"
    ) -> None:
        self.times = PrefetchTimes(RECORD, arrival_s, miss_s, 0.0, late_saves=False, urgent_share=0.0)
        self.now_s = 0.0
        self.offered: list[tuple[int, int]] = []
        self.evicted: list[tuple[int, int]] = []
        self.misses = 0
        self._experts, self._layer_s = experts, layer_s
        self._pool = Pool(range(slots), make_policy(policy, slots))
        self._on_way: deque[tuple[int, float]] = deque()

    def clock(self) -> float:
        return self.now_s

    def want(self, layer: int, experts: Sequence[int]) -> None:
        """A layer of a step, up to where its experts have been computed."""
        self.now_s += self._layer_s
        self._settle()
        for expert in experts:
            key = layer * self._experts + expert
            if self._pool.use(key) is None:
                self.misses += 1
                self.now_s += self.times.miss_s
                if key not in self._pool.arriving and self._pool.reserve(key) is not None:
                    self._send(key)

    @property
    def backlog_bytes(self) -> int:
        self._settle()
        return len(self._on_way) * RECORD

    def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
        self._settle()
        first = layer * self._experts
        there, coming = self._pool.residents, self._pool.arriving
        return [expert for expert in experts if first + expert not in there and first + expert not in coming]

    def residents(self) -> set[tuple[int, int]]:
        return {divmod(key, self._experts) for key in self._pool.residents}

    def prefetch(self, layer: int, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        begun, dying = 0, iter(dead)
        for expert in experts:
            key = layer * self._experts + expert
            if self.absent(layer, [expert]) and (self._has_room() or self._evict_one(dying)):
                assert self._pool.reserve(key, only_if_admitted=False) is not None
                self._send(key)
                begun += 1
        return begun

    def _has_room(self) -> bool:
        return self._pool.capacity > len(self._pool.residents) + len(self._pool.arriving)

    def _evict_one(self, dying: Iterator[tuple[int, int]]) -> bool:
        for pair in dying:
            self.offered.append(pair)
            key = pair[0] * self._experts + pair[1]
            if key in self._pool.residents:
                self._pool.evict(key)
                self.evicted.append(pair)
                return True
        return False

    def _send(self, key: int) -> None:
        begins_s = max(self.now_s, self._on_way[-1][1] if self._on_way else 0.0)
        self._on_way.append((key, begins_s + self.times.arrival_s))

    def _settle(self) -> None:
        while self._on_way and self._on_way[0][1] <= self.now_s:
            self._pool.arrived(self._on_way.popleft()[0])


class PlantedRoutes:
    """Steps of a made-up model.

    Args:
        follows: probability that a layer's expert is the one that the expert of the layer before leads to.
        repeats: probability that the first layer's experts are those of the token before; else they are random.
    """

    def __init__(
        self, layers: int, experts: int, per_token: int, *, follows: float, repeats: float = 0.0, seed: int = 3
    ) -> None:
        self._dice = random.Random(seed)
        self._experts, self._per_token, self._follows, self._repeats = experts, per_token, follows, repeats
        self._leads = [self._dice.sample(range(experts), experts) for _ in range(layers)]
        self._first: list[int] = []

    def step(self) -> list[list[int]]:
        """Distinct experts for each layer."""
        dice = self._dice
        if not self._first or dice.random() >= self._repeats:
            self._first = dice.sample(range(self._experts), self._per_token)
        chosen = [self._first]
        for leads in self._leads[1:]:
            wanted: list[int] = []
            for expert in chosen[-1]:
                coming = leads[expert] if dice.random() < self._follows else dice.randrange(self._experts)
                while coming in wanted:
                    coming = dice.randrange(self._experts)
                wanted.append(coming)
            chosen.append(wanted)
        return chosen
