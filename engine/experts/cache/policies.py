"""Replacement policies: the eviction order of one pool's residents.

A policy sees hits, insertions and removals of keys, and yields victims, best first.  It ignores pins: the pool skips
pinned victims.  All operations are O(1) or O(log n) amortised, so the cost of a decode step depends on the experts it
uses, not on the experts that exist.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

Key = int
"""layer * experts_per_layer + expert: a single integer because it is hashed on every step."""


class Policy(ABC):
    """Order of eviction among the resident keys of one pool.

    Attributes:
        copy_price: uses that pay for bringing a key; those that count uses bring none that has not so many more.
    """

    copy_price: float = 0.0

    @abstractmethod
    def hit(self, key: Key) -> None:
        """`key` is resident and was used."""

    def used(self, keys: Sequence[Key], hits: Sequence[Key]) -> None:
        resident = set(hits)
        for key in keys:
            (self.hit if key in resident else self.missed)(key)

    def missed(self, key: Key) -> None:  # noqa: B027  (most policies remember residents only)
        """`key` was used while not resident; frequency policies count that too."""

    @abstractmethod
    def insert(self, key: Key) -> None:
        """`key` became resident."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """`key` is no longer resident."""

    @abstractmethod
    def victims(self) -> Iterator[Key]:
        """Residents in eviction order.  Valid until another method is called."""

    def admits(self, key: Key, victim: Key) -> bool:  # noqa: ARG002
        """Whether `key` is worth more than the resident `victim`."""
        return True

    @abstractmethod
    def without_residents(self) -> Policy:
        """A policy of the same kind with this one's history, but without residents."""


class Lru(Policy):
    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def hit(self, key: Key) -> None:
        self._order.move_to_end(key)

    def used(self, keys: Sequence[Key], hits: Sequence[Key]) -> None:  # noqa: ARG002
        move = self._order.move_to_end
        for key in hits:
            move(key)

    def insert(self, key: Key) -> None:
        self._order[key] = None

    def remove(self, key: Key) -> None:
        del self._order[key]

    def victims(self) -> Iterator[Key]:
        return iter(self._order)

    def without_residents(self) -> Policy:
        return type(self)()


class Fifo(Lru):
    def hit(self, key: Key) -> None:
        pass

    def used(self, keys: Sequence[Key], hits: Sequence[Key]) -> None:
        pass


class RandomOrder(Policy):
    """Evicts in random order; deterministic for a given seed."""

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
        # Lazy Fisher-Yates from the front: usually only the first victim is consumed.
        keys = self._keys
        for first in range(len(keys)):
            other = self._random.randrange(first, len(keys))
            keys[first], keys[other] = keys[other], keys[first]
            self._place[keys[first]], self._place[keys[other]] = first, other
            yield keys[first]

    def without_residents(self) -> Policy:
        return RandomOrder(self._random.getrandbits(32))


class Scored(Policy):
    """Evicts the lowest score first, where every use adds to the score of a key, resident or not.

    The heap holds scores as they were when pushed.  Scores only grow, so a stale entry is a lower bound: it is
    replaced with the current score when it reaches the top, so a hit is only one dictionary write.

    Args:
        half_life: uses of the pool after which a use counts half.  `None` never decays, which is LFU.
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
        # Growing the gain of new uses is equivalent to decaying all old scores, without touching them.
        self._gain *= self._growth
        self._score[key] = self._score.get(key, 0.0) + self._gain
        if self._gain > self._RESCALE_ABOVE:
            self._rescale()

    missed = hit

    def used(self, keys: Sequence[Key], hits: Sequence[Key]) -> None:  # noqa: ARG002
        score, growth, gain = self._score, self._growth, self._gain
        for key in keys:
            gain *= growth
            score[key] = score.get(key, 0.0) + gain
        self._gain = gain
        if gain > self._RESCALE_ABOVE:
            self._rescale()

    def insert(self, key: Key) -> None:
        self._resident.add(key)
        self._push(key)

    def remove(self, key: Key) -> None:
        self._resident.discard(key)
        if len(self._heap) > 4 * len(self._resident) + 64:
            self._rebuild()

    def victims(self) -> Iterator[Key]:
        heap, resident, score = self._heap, self._resident, self._score
        yielded: set[Key] = set()
        try:
            while heap:
                # A yielded key stays on top unless the caller asks for another, which is rare.
                pushed_score, _, key = heap[0]
                if key not in resident or key in yielded:
                    heapq.heappop(heap)
                elif (now := score.get(key, 0.0)) > pushed_score:
                    self._tick += 1
                    heapq.heapreplace(heap, (now, self._tick, key))
                else:
                    yield key
                    yielded.add(key)
        finally:
            for key in sorted(yielded):  # a set has no reproducible order
                if key in resident:
                    self._push(key)

    def admits(self, key: Key, victim: Key) -> bool:
        # What a key was used more often than another, it will be again while this policy remembers it.
        lead = self._score.get(key, 0.0) - self._score.get(victim, 0.0)
        return lead >= self.copy_price * self._gain

    def without_residents(self) -> Policy:
        policy = Scored()
        policy._growth, policy._gain, policy._score = self._growth, self._gain, dict(self._score)
        return policy

    def _push(self, key: Key) -> None:
        # Among equal scores the tick evicts the older push first, and keeps keys out of the comparison.
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
    """Scores fixed by a calibration run: the most popular experts stay resident (Fiddler's placement)."""

    def __init__(self, popularity: Mapping[Key, float]) -> None:
        super().__init__()
        self._score = dict(popularity)

    def hit(self, key: Key) -> None:
        pass

    missed = hit

    def used(self, keys: Sequence[Key], hits: Sequence[Key]) -> None:
        pass

    def admits(self, key: Key, victim: Key) -> bool:
        return self._score.get(key, 0.0) > self._score.get(victim, 0.0)

    def without_residents(self) -> Policy:
        return StaticPopularity(self._score)


LFRU_HALF_LIFE_POOLS = 4.0
"""Half-life of LFRU in multiples of the pool's capacity; not tuned to any trace."""


def _static(popularity: Mapping[Key, float] | None) -> Policy:
    if popularity is None:
        raise ValueError("the static policy needs the popularity from a calibration")
    return StaticPopularity(popularity)


POLICIES: dict[str, Callable[[int, Mapping[Key, float] | None, int], Policy]] = {
    "lru": lambda _capacity, _popularity, _seed: Lru(),
    "lfru": lambda capacity, _popularity, _seed: Scored(half_life=LFRU_HALF_LIFE_POOLS * max(capacity, 1)),
    "lfu": lambda _capacity, _popularity, _seed: Scored(),
    "fifo": lambda _capacity, _popularity, _seed: Fifo(),
    "random": lambda _capacity, _popularity, seed: RandomOrder(seed),
    "static": lambda _capacity, popularity, _seed: _static(popularity),
}
"""What makes each policy for a pool of so many slots."""
POLICY_NAMES = tuple(POLICIES)
CANDIDATES = tuple(name for name in POLICIES if name != "static")
"""What `auto` chooses from.  Ties go to the first, which adapts fastest."""


def make_policy(name: str, capacity: int, popularity: Mapping[Key, float] | None = None, seed: int = 0) -> Policy:
    """The policy called `name` for a pool of `capacity` slots."""
    if name not in POLICIES:
        raise ValueError(f"unknown cache policy {name!r}; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](capacity, popularity, seed)


Slot = int


class Pool:
    """`capacity` slots and the eviction policy for them.

    A key is absent, arriving (its slot is reserved but the copy has not ended, so not a hit) or resident.  Arriving
    and pinned keys are never evicted.

    Args:
        slots: identifiers of the slots, unique across the pools of one tier.
        on_evicted: called with every evicted key.

    Attributes:
        residents: resident keys and their slots; read-only.
        arriving: keys whose copy is in flight, and their slots; read-only.
    """

    def __init__(self, slots: range, policy: Policy, on_evicted: Callable[[Key], None] | None = None) -> None:
        self.policy = policy
        self.residents: dict[Key, Slot] = {}
        self.arriving: dict[Key, Slot] = {}
        self._free: list[Slot] = list(reversed(slots))
        self._pins: dict[Key, int] = {}
        self._on_evicted = on_evicted

    @property
    def capacity(self) -> int:
        return len(self._free) + len(self.residents) + len(self.arriving)

    @property
    def free(self) -> int:
        return len(self._free)

    def use(self, key: Key) -> Slot | None:
        """Records a use of `key`: its slot if it is resident (a hit), else None (a miss)."""
        slot = self.residents.get(key)
        if slot is None:
            self.policy.missed(key)
        else:
            self.policy.hit(key)
        return slot

    def use_all(self, keys: Sequence[Key]) -> list[Slot | None]:
        """`use` and `pin` for all keys of one step, inlined because this is the hot path."""
        residents, pins, hit, missed = self.residents, self._pins, self.policy.hit, self.policy.missed
        slots: list[Slot | None] = []
        for key in keys:
            slot = residents.get(key)
            if slot is None:
                missed(key)
            else:
                hit(key)
                pins[key] = pins.get(key, 0) + 1
            slots.append(slot)
        return slots

    def pin(self, key: Key) -> None:
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        left = self._pins[key] - 1
        if left:
            self._pins[key] = left
        else:
            del self._pins[key]

    def is_used(self, key: Key) -> bool:
        return key in self._pins

    def reserve(self, key: Key, only_if_admitted: bool = True) -> Slot | None:
        """Reserves a slot for the absent `key`, which is then arriving; None if no resident should or can be evicted.

        Args:
            only_if_admitted: let the policy refuse if the victim is worth more than `key`.
        """
        if key in self.residents or key in self.arriving:
            raise ValueError(f"expert {key} already has a slot")
        if self._free:
            slot = self._free.pop()
        else:
            victim = self._victim()
            if victim is None or (only_if_admitted and not self.policy.admits(key, victim)):
                return None
            self.policy.remove(victim)
            slot = self.residents.pop(victim)
            if self._on_evicted is not None:
                self._on_evicted(victim)
        self.arriving[key] = slot
        return slot

    def arrived(self, key: Key) -> None:
        self.residents[key] = self.arriving.pop(key)
        self.policy.insert(key)

    def abandon(self, key: Key) -> None:
        self._free.append(self.arriving.pop(key))

    def evict(self, key: Key) -> Slot:
        """Evicts the resident `key`."""
        if key in self._pins:
            raise ValueError(f"expert {key} is in use")
        self.policy.remove(key)
        slot = self.residents.pop(key)
        self._free.append(slot)
        if self._on_evicted is not None:
            self._on_evicted(key)
        return slot

    def shrink(self, count: int) -> list[Slot]:
        """Removes up to `count` slots, evicting by policy; fewer if the others are pinned or in flight."""
        removed: list[Slot] = []
        while len(removed) < count:
            if not self._free:
                victim = self._victim()
                if victim is None:
                    break
                self.evict(victim)
            removed.append(self._free.pop())
        return removed

    def withdraw(self, slots: range) -> bool:
        """Removes exactly these slots, evicting their residents.  False, with nothing changed, if any is in use.

        An expert whose copy failed may still be pinned by the step that wanted it, although it has no slot any more.
        Nothing is removed before it is unpinned, so that its pool still exists then.
        """
        leaving = [key for key, slot in self.residents.items() if slot in slots]
        if any(key in self._pins for key in leaving) or any(slot in slots for slot in self.arriving.values()):
            return False
        if self._pins.keys() - self.residents.keys() - self.arriving.keys():
            return False
        for key in leaving:
            self.evict(key)
        self._free = [slot for slot in self._free if slot not in slots]
        return True

    def move(self, key: Key, slot: Slot) -> Slot:
        """Records that `key` was copied to `slot`, which the pool did not have before; returns the slot it replaces."""
        if key in self._pins:
            raise ValueError(f"expert {key} is in use")
        left, self.residents[key] = self.residents[key], slot
        return left

    def grow(self, slots: list[Slot]) -> None:
        self._free.extend(slots)

    def adopt(self, policy: Policy) -> None:
        for key in list(self.policy.victims()):
            policy.insert(key)
        self.policy = policy

    def _victim(self) -> Key | None:
        pins = self._pins
        for key in self.policy.victims():
            if key not in pins:
                return key
        return None
