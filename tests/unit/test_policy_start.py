"""Which policy a cache begins with, and that another one can still be adopted."""

from engine.experts.cache.selection import PolicySelector


def test_a_policy_that_is_adopted_from_the_start_gives_way_to_a_better_one() -> None:
    popularity = dict.fromkeys(range(4), 1.0)
    selector = PolicySelector(4, ["lru"], popularity, adopted="static")
    for key in popularity:
        selector.observe([key])
    changed = [selector.observe([8 + step % 4]) for step in range(400)]  # others are used now, again and again
    assert any(policy is not None for policy in changed)
    assert selector.adopted == "lru"
