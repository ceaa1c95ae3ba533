"""The expert cache's bookkeeping: no key twice, none in use or in flight evicted, slots neither lost nor made."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.experts.cache.policies import POLICY_NAMES, make_policy
from engine.experts.cache.pool import Pool
from engine.experts.cache.selection import PolicySelector, step_pool

_KEYS = st.integers(0, 11)
_POPULARITY = {key: float(12 - key) for key in range(12)}


class PoolMachine(RuleBasedStateMachine):
    """Any order of uses, copies, pins, resizes and changes of policy."""

    @initialize(capacity=st.integers(0, 6), name=st.sampled_from(POLICY_NAMES))
    def make(self, capacity: int, name: str) -> None:
        self.capacity = capacity
        self.evicted: list[int] = []
        self.pool = Pool(range(capacity), make_policy(name, capacity, _POPULARITY), self.evicted.append)
        self.pins: dict[int, int] = {}
        self.given: list[int] = []

    @rule(key=_KEYS)
    def use(self, key: int) -> None:
        assert self.pool.use(key) == self.pool.residents.get(key)

    @rule(key=_KEYS, admit=st.booleans())
    def reserve(self, key: int, admit: bool) -> None:
        if key in self.pool.residents or key in self.pool.arriving:
            with pytest.raises(ValueError, match="already has a slot"):
                self.pool.reserve(key)
            return
        before = set(self.pool.residents)
        arriving = set(self.pool.arriving)
        self.evicted.clear()
        placed = self.pool.reserve(key, only_if_admitted=admit)
        gone = before - set(self.pool.residents)
        assert not gone & self.pins.keys()
        assert arriving <= set(self.pool.arriving)
        if placed is None:
            assert not gone
        assert sorted(gone) == self.evicted

    @precondition(lambda self: self.pool.arriving)
    @rule(data=st.data(), fails=st.booleans())
    def end_copy(self, data: st.DataObject, fails: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.pool.arriving)))
        if fails:
            self.pool.abandon(key)
            assert key not in self.pool.residents
        else:
            self.pool.arrived(key)
            assert key in self.pool.residents

    @precondition(lambda self: self.pool.residents)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pool.residents)))
        self.pool.pin(key)
        self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.pool.unpin(key)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]

    @rule(count=st.integers(0, 4))
    def shrink(self, count: int) -> None:
        given = self.pool.shrink(count)
        assert len(given) <= count
        self.given += given

    @rule()
    def grow(self) -> None:
        self.pool.grow(self.given)
        self.given = []

    @rule(name=st.sampled_from(POLICY_NAMES))
    def adopt(self, name: str) -> None:
        self.pool.adopt(make_policy(name, self.capacity, _POPULARITY))

    @invariant()
    def slots_are_neither_lost_nor_shared(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = [*self.pool.residents.values(), *self.pool.arriving.values(), *self.given]
        assert len(held) == len(set(held))
        assert self.pool.capacity + len(self.given) == self.capacity
        assert set(self.pins) <= set(self.pool.residents)
        assert sorted(self.pool.policy.victims()) == sorted(self.pool.residents)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=75, stateful_step_count=40)


@pytest.mark.parametrize(
    ("name", "kept"),
    [("lru", {1, 9}), ("fifo", {3, 9}), ("lfu", {1, 9}), ("static", {1, 2})],
)
def test_who_leaves(name: str, kept: set[int]) -> None:
    pool = Pool(range(2), make_policy(name, 2, {1: 5.0, 2: 4.0, 3: 3.0, 9: 1.0}))
    uses = [1, 1, 1, 2, 1, 3, 1, 1, 9] if name != "fifo" else [1, 2, 1, 3, 9]
    for key in uses:
        step_pool(pool, [key])
    if name == "lfu":  # 9 was used as often as whom it would have to displace: the newcomer wins
        assert 1 in pool.residents
    else:
        assert set(pool.residents) == kept


def test_a_step_with_more_experts_than_slots_evicts_none_of_its_own() -> None:
    pool = Pool(range(2), make_policy("lru", 2))
    assert step_pool(pool, [1, 2, 3, 4]) == (0, 2)
    assert set(pool.residents) == {1, 2}
    assert step_pool(pool, [1, 2, 3, 4]) == (2, 0)


def test_the_selector_leaves_a_policy_that_never_hits() -> None:
    # A loop one longer than the cache: LRU evicts each key just before its turn.
    selector = PolicySelector(8)
    pool = Pool(range(8), make_policy(selector.adopted, 8))
    assert selector.adopted == "lru"
    hits = 0
    for step in range(4000):
        hits += step_pool(pool, [step % 9])[0]
        better = selector.observe([step % 9])
        if better is not None:
            pool.adopt(better)
    assert selector.adopted != "lru"
    assert hits > 1500


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="mru"):
        make_policy("mru", 4)
    with pytest.raises(ValueError, match="calibration"):
        make_policy("static", 4)


def test_a_newcomer_has_to_be_used_so_much_more_that_it_pays_for_its_copy() -> None:
    for price, stays in ((0.0, False), (2.0, False), (2.5, True)):
        policy = make_policy("lfu", 2)
        policy.copy_price = price
        pool = Pool(range(2), policy)
        for key in [1, 1, 1, 2]:
            step_pool(pool, [key])
        for _ in range(3):
            pool.use(9)
        assert (pool.reserve(9) is None) == stays  # used three times, and the other once


def test_copies_that_cost_more_than_they_gain_are_left_to_nobody() -> None:
    """Keys drawn from a popularity that does not change: who keeps the most used copies nothing, and hits most."""
    drawn = Random(5)
    popularity = {key: 1 / (1 + key) for key in range(64)}
    kinds = {}
    for price in (0.0, 4.0):
        selector = PolicySelector(16, popularity=popularity)
        selector.copy_price = price
        for _ in range(3000):
            selector.observe(sorted(set(drawn.choices(range(64), list(popularity.values()), k=4))))
        kinds[price] = selector.adopted
    assert kinds[4.0] in ("static", "lfu", "lfru")
    shadow = next(each for each in selector._shadows if each.name == selector.adopted)
    lru = next(each for each in selector._shadows if each.name == "lru")
    assert shadow.copies < lru.copies / 4
