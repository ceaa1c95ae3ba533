"""One tier of experts in any order of lookups, copies, failures and resizes, whatever it is that copies."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.experts.cache.policies import POLICY_NAMES, make_policy
from engine.experts.cache.tier import ADAPTIVE, Copy, Purpose, Tier

LAYERS, EXPERTS, NBYTES = 3, 4, 10
POPULARITY = {key: float(20 - key) for key in range(LAYERS * EXPERTS)}

_LAYER = st.integers(0, LAYERS - 1)
_EXPERT = st.integers(0, EXPERTS - 1)


@dataclass
class Memory:
    """A copier: bytes are on their way until a test ends the copy, and none comes from a source that is closed."""

    holds: dict[int, object] = field(default_factory=dict)
    started: int = 0

    def start(self, layer: int, expert: int, slot: int, source: str, purpose: Purpose) -> int:
        del purpose
        if source == "closed":
            raise RuntimeError(source)
        self.started += 1
        self.holds[slot] = None  # what was there is gone from now on
        return layer * EXPERTS + expert


class TierMachine(RuleBasedStateMachine):
    """Pools for all layers or for each, as VRAM has them, and one for some of the layers, as RAM has them."""

    @initialize(
        slots=st.integers(0, 6),
        shape=st.sampled_from(["all share one", "each has some", "some share one"]),
        policy=st.sampled_from([*POLICY_NAMES, ADAPTIVE]),
    )
    def make(self, slots: int, shape: str, policy: str) -> None:
        self.memory = Memory()
        self.tier = Tier(self.memory, LAYERS, EXPERTS, NBYTES, policy, POPULARITY)
        if shape == "each has some":
            for layer in range(slots // 2):
                self.tier.open_pool([layer], range(2 * layer, 2 * layer + 2), 2)
        else:
            self.tier.open_pool(range(LAYERS if shape == "all share one" else 2), range(slots), slots)
        self.tier.renew_sampler()
        self.pins: list[tuple[int, list[int]]] = []
        self.given: list[list[int]] = [[] for _ in self.tier.pools]
        self.slots = self.tier.capacity
        self.arrived = 0

    def in_use(self) -> set[int]:
        return {self.tier.key_of(layer, expert) for layer, experts in self.pins for expert in experts}

    @rule(layer=_LAYER, experts=st.sets(_EXPERT, max_size=3))
    def look_up(self, layer: int, experts: set[int]) -> None:
        wanted = sorted(experts)
        keys = [self.tier.key_of(layer, expert) for expert in wanted]
        there, coming = self.tier.residents(layer), dict(self.tier.pool_of[layer].arriving)
        self.tier.observe(layer, keys)
        found = self.tier.look_up(layer, keys)
        assert {one: slot for one, slot in zip(wanted, found, strict=True) if slot is not None} == {
            one: there[one] for one in wanted if one in there
        }
        assert not {key for key, slot in zip(keys, found, strict=True) if slot is not None} & coming.keys()
        self.pins.append((layer, [one for one in wanted if one in there]))

    @rule(layer=_LAYER)
    def hold(self, layer: int) -> None:
        used = self.tier.counters.prefetches_used
        held = self.tier.hold(layer, range(EXPERTS))
        assert held == self.tier.residents(layer)
        assert not held.keys() & set(self.tier.absent(layer, range(EXPERTS)))
        assert self.tier.counters.prefetches_used == used
        self.pins.append((layer, list(held)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.tier.release(*self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(
        layer=_LAYER,
        expert=_EXPERT,
        purpose=st.sampled_from([Purpose.FETCH, Purpose.POST_FETCH]),
        forced=st.booleans(),
        source=st.sampled_from(["open", "open", "open", "closed"]),
    )
    def bring(self, layer: int, expert: int, purpose: Purpose, forced: bool, source: str) -> None:
        was_absent = bool(self.tier.absent(layer, [expert]))
        evictions = self.tier.counters.evictions
        before = {key for pool in self.tier.pools for key in pool.residents}
        try:
            copy = self.tier.bring(layer, expert, source, purpose, only_if_admitted=not forced)
        except RuntimeError:
            assert self.tier.absent(layer, [expert]) == [expert]
        else:
            assert was_absent or copy is None
        gone = before - {key for pool in self.tier.pools for key in pool.residents}
        assert not gone & self.in_use()
        assert len(gone) == self.tier.counters.evictions - evictions

    @rule(layer=_LAYER, expert=_EXPERT, dead=st.lists(st.tuples(_LAYER, _EXPERT), max_size=3))
    def prefetch(self, layer: int, expert: int, dead: list[tuple[int, int]]) -> None:
        pool = self.tier.pool_of[layer]
        free, before, in_use = pool.free, set(pool.residents), self.in_use()
        copy = self.tier.prefetch(layer, expert, "open", dead)
        gone = before - pool.residents.keys()
        assert gone <= {self.tier.key_of(*pair) for pair in dead} - in_use
        assert len(gone) == (copy is not None and not free)

    @precondition(lambda self: self.tier.copies)
    @rule(data=st.data(), succeeded=st.booleans())
    def end(self, data: st.DataObject, succeeded: bool) -> None:
        copy: Copy[int] = data.draw(st.sampled_from(list(self.tier.copies.values())))
        if succeeded:
            self.memory.holds[copy.slot] = copy.handle
            self.arrived += NBYTES
        self.tier.end(copy, succeeded=succeeded)
        assert (copy.key in copy.pool.residents) == succeeded

    @precondition(lambda self: self.tier.pools)
    @rule(data=st.data(), count=st.integers(0, 3))
    def resize(self, data: st.DataObject, count: int) -> None:
        number = data.draw(st.integers(0, len(self.tier.pools) - 1))
        if self.given[number]:
            self.tier.pools[number].grow(self.given[number])
            self.given[number] = []
        else:
            self.given[number] = self.tier.pools[number].shrink(count)
        self.tier.renew_sampler()

    @precondition(lambda self: self.tier.pools)
    @rule(data=st.data(), name=st.sampled_from(POLICY_NAMES))
    def adopt(self, data: st.DataObject, name: str) -> None:
        pool = data.draw(st.sampled_from(self.tier.pools))
        pool.adopt(make_policy(name, pool.capacity, POPULARITY))

    @invariant()
    def none_in_use_or_in_flight_has_left(self) -> None:
        residents = {key for pool in self.tier.pools for key in pool.residents}
        arriving = {key for pool in self.tier.pools for key in pool.arriving}
        assert self.in_use() <= residents
        assert arriving == self.tier.copies.keys()
        assert not arriving & residents

    @invariant()
    def slots_are_neither_lost_nor_shared(self) -> None:
        taken = [slot for pool in self.tier.pools for slot in (*pool.residents.values(), *pool.arriving.values())]
        assert len(taken) == len(set(taken)) == self.tier.filled
        assert self.tier.capacity + sum(map(len, self.given)) == self.slots
        for pool in self.tier.pools:
            assert all(self.memory.holds[slot] == key for key, slot in pool.residents.items())
            assert sorted(pool.policy.victims()) == sorted(pool.residents)

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        counters = self.tier.counters
        assert counters.kept_bytes + counters.post_fetched_bytes + counters.prefetched_bytes == self.arrived
        assert self.tier.backlog_bytes == len(self.tier.copies) * NBYTES
        assert counters.prefetches_used + counters.prefetches_wasted + len(self.tier.predicted) == counters.prefetched
        snapshot = self.tier.snapshot()
        assert (len(snapshot.residents), len(snapshot.arriving)) == (
            self.tier.filled - len(self.tier.copies),
            len(self.tier.copies),
        )


TierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTier = TierMachine.TestCase


def test_a_copy_is_no_hit_until_it_has_ended_and_what_was_predicted_counts_once() -> None:
    tier = Tier(Memory(), 1, EXPERTS, NBYTES, "lru")
    tier.open_pool([0], range(2), 2)
    copy = tier.prefetch(0, 1, "open")
    assert copy is not None
    assert tier.look_up(0, [1]) == [None]
    tier.end(copy, succeeded=True)
    assert tier.look_up(0, [1]) == tier.look_up(0, [1]) == [copy.slot]
    failed = tier.prefetch(0, 2, "open")
    assert failed is not None
    tier.end(failed, succeeded=False)
    counters = tier.counters
    assert (counters.prefetched, counters.prefetches_used, counters.prefetches_wasted) == (2, 1, 1)
    assert (counters.prefetched_bytes, counters.failures) == (NBYTES, 1)


@pytest.mark.parametrize("own", [False, True])
def test_the_best_policy_is_adopted(own: bool) -> None:
    """A loop one expert longer than the pool: the worst there is for LRU, which is where it starts."""
    tier = Tier(Memory(), LAYERS, EXPERTS, NBYTES, ADAPTIVE)
    for layer in range(LAYERS if own else 1):
        tier.open_pool([layer] if own else range(LAYERS), range(3 * layer, 3 * layer + (3 if own else 9)), 3)
    tier.renew_sampler()
    for step in range(1200):
        for layer in range(LAYERS):
            key = tier.key_of(layer, step % EXPERTS)
            tier.observe(layer, [key])
            if tier.look_up(layer, [key]) == [None]:
                copy = tier.bring(layer, step % EXPERTS, "open", Purpose.POST_FETCH)
                if copy is not None:
                    tier.end(copy, succeeded=True)
            else:
                tier.release(layer, [step % EXPERTS])
    assert tier.policy not in ("lru", "fifo")
    assert tier.snapshot().policy == tier.policy
    assert tier.filled == 9
