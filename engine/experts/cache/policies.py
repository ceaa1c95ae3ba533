"""Replacement policies: the order in which residents of one pool leave.

A policy sees hits, insertions and removals of keys and names victims, best first.  It never decides about pinned
keys: the pool skips those.  All operations are O(1) or O(log n) amortised, so that a decode step costs time in
proportion to the experts it uses, not to the experts that exist.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping

Key = int
"""layer * experts_per_layer + expert: one integer, because it is hashed on every step."""

POLICY_NAMES = ("lru", "fifo", "lfu", "lfru", "random", "static")


class Policy(ABC):
    """Order of eviction among the resident keys of one pool."""

    @abstractmethod
    def hit(self, key: Key) -> None:
        """`key` is resident and was used."""

    def missed(self, key: Key) -> None:  # noqa: B027  (most policies remember residents only)
        """`key` was used while not resident; frequency policies count it all the same."""

    @abstractmethod
    def insert(self, key: Key) -> None:
        """`key` became resident."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """`key` is no longer resident."""

    @abstractmethod
    def victims(self) -> Iterator[Key]:
        """Residents in the order in which they should leave.  Valid until the next call of another method."""

    def admits(self, key: Key, victim: Key) -> bool:  # noqa: ARG002
        """Whether `key` is worth more than the resident `victim`."""
        return True

    @abstractmethod
    def heir(self) -> Policy:
        """A policy of the same kind that remembers what this one saw, without residents."""


class Lru(Policy):
    """Least recently used leaves first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def hit(self, key: Key) -> None:
        self._order.move_to_end(key)

    def insert(self, key: Key) -> None:
        self._order[key] = None

    def remove(self, key: Key) -> None:
        del self._order[key]

    def victims(self) -> Iterator[Key]:
        return iter(self._order)

    def heir(self) -> Policy:
        return type(self)()


class Fifo(Lru):
    """First in leaves first, used or not."""

    def hit(self, key: Key) -> None:
        pass


class RandomOrder(Policy):
    """Any resident may leave; deterministic for a given seed."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._keys: list[Key] = []
        self._place: dict[Key, int] = {}

    def hit(self, key: Key) -> None:
        pass

    def insert(self, key: Key) -> None:
        self._place[key] = len(self._keys)
        self._keys.append(key)

    def remove(self, key: Key) -> None:
        place, last = self._place.pop(key), self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._place[last] = place

    def victims(self) -> Iterator[Key]:
        # Fisher-Yates from the front, one step per victim asked for: usually only one is.
        keys = self._keys
        for first in range(len(keys)):
            other = self._random.randrange(first, len(keys))
            keys[first], keys[other] = keys[other], keys[first]
            self._place[keys[first]], self._place[keys[other]] = first, other
            yield keys[first]

    def heir(self) -> Policy:
        return RandomOrder(self._random.getrandbits(32))


class Scored(Policy):
    """Least `score` leaves first, where a use adds to the score of a key, resident or not.

    The heap holds scores as they were when pushed.  Scores only grow, so a stale entry is a lower bound: it is
    pushed again with its present score when it comes to the top, which makes a hit one dictionary write.

    Args:
        half_life: uses of the pool after which a use counts half.  `None` never forgets: that is LFU.
            A finite one is LRFU's combined recency and frequency (Lee et al. 2001, eq. 1), here called LFRU.
    """

    _RESCALE_ABOVE = 1e200

    def __init__(self, half_life: float | None = None) -> None:
        self._growth = 2.0 ** (1.0 / half_life) if half_life else 1.0
        self._gain = 1.0
        self._tick = 0
        self._score: dict[Key, float] = {}
        self._resident: set[Key] = set()
        self._heap: list[tuple[float, int, Key]] = []

    def hit(self, key: Key) -> None:
        # Old uses fade relative to new ones because new ones add ever more: nothing has to be decayed.
        self._gain *= self._growth
        self._score[key] = self._score.get(key, 0.0) + self._gain
        if self._gain > self._RESCALE_ABOVE:
            self._rescale()

    missed = hit

    def insert(self, key: Key) -> None:
        self._resident.add(key)
        self._push(key)

    def remove(self, key: Key) -> None:
        self._resident.discard(key)
        if len(self._heap) > 4 * len(self._resident) + 64:
            self._rebuild()

    def victims(self) -> Iterator[Key]:
        heap, resident, score = self._heap, self._resident, self._score
        named: set[Key] = set()
        try:
            while heap:
                # Whoever is named stays on top until another is asked for, which is rare.
                pushed_score, _, key = heap[0]
                if key not in resident or key in named:
                    heapq.heappop(heap)
                elif (now := score.get(key, 0.0)) > pushed_score:
                    self._tick += 1
                    heapq.heapreplace(heap, (now, self._tick, key))
                else:
                    yield key
                    named.add(key)
        finally:
            for key in sorted(named):  # a set has no order of its own to repeat
                if key in resident:
                    self._push(key)

    def admits(self, key: Key, victim: Key) -> bool:
        return self._score.get(key, 0.0) >= self._score.get(victim, 0.0)

    def heir(self) -> Policy:
        heir = Scored()
        heir._growth, heir._gain, heir._score = self._growth, self._gain, dict(self._score)
        return heir

    def _push(self, key: Key) -> None:
        # The tick makes the older push leave first among equals, and keeps keys out of the comparison.
        self._tick += 1
        heapq.heappush(self._heap, (self._score.get(key, 0.0), self._tick, key))

    def _rescale(self) -> None:
        self._score = {key: score / self._gain for key, score in self._score.items()}
        self._gain = 1.0
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = []
        for key in self._resident:
            self._push(key)


class StaticPopularity(Scored):
    """Scores fixed by a calibration run: the most popular stay for good (Fiddler's placement).

    Args:
        popularity: uses of each key in the calibration; absent keys were never used.
    """

    def __init__(self, popularity: Mapping[Key, float]) -> None:
        super().__init__()
        self._score = dict(popularity)

    def hit(self, key: Key) -> None:
        pass

    missed = hit

    def admits(self, key: Key, victim: Key) -> bool:
        return self._score.get(key, 0.0) > self._score.get(victim, 0.0)

    def heir(self) -> Policy:
        return StaticPopularity(self._score)


LFRU_HALF_LIFE_POOLS = 4.0
"""LFRU forgets half of a use after this many times its capacity uses; chosen on no particular trace."""


def make_policy(name: str, capacity: int, popularity: Mapping[Key, float] | None = None, seed: int = 0) -> Policy:
    """The policy called `name` for a pool of `capacity` slots.

    Raises:
        ValueError: for an unknown name, or `static` without a popularity.
    """
    if name == "lru":
        return Lru()
    if name == "fifo":
        return Fifo()
    if name == "lfu":
        return Scored()
    if name == "lfru":
        return Scored(half_life=LFRU_HALF_LIFE_POOLS * max(capacity, 1))
    if name == "random":
        return RandomOrder(seed)
    if name == "static" and popularity is not None:
        return StaticPopularity(popularity)
    if name == "static":
        raise ValueError("static popularity needs a calibration to rank the experts by")
    raise ValueError(f"no cache policy is called {name!r}; there are {', '.join(POLICY_NAMES)}")
