"""Which experts stay in a cache: by each policy, by the one that a cache begins with, and by the one that chooses."""

from random import Random

import pytest

from engine.experts.cache.policies import Pool, make_policy
from engine.experts.cache.tier import PolicySelector, step_pool


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


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="mru"):
        make_policy("mru", 4)
    with pytest.raises(ValueError, match="calibration"):
        make_policy("static", 4)


def test_a_key_gets_one_slot() -> None:
    pool = Pool(range(2), make_policy("lru", 2))
    assert pool.reserve(1) is not None
    with pytest.raises(ValueError, match="already has a slot"):
        pool.reserve(1)


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


def test_a_policy_that_is_adopted_from_the_start_gives_way_to_a_better_one() -> None:
    popularity = dict.fromkeys(range(4), 1.0)
    selector = PolicySelector(4, ["lru"], popularity, adopted="static")
    for key in popularity:
        selector.observe([key])
    changed = [selector.observe([8 + step % 4]) for step in range(400)]  # others are used now, again and again
    assert any(policy is not None for policy in changed)
    assert selector.adopted == "lru"
