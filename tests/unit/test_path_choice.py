"""Tokens go the way that is cheaper as a whole, at the hit rate of these days, and find back when that changes."""

import random

import pytest

from engine.experts.latency import LatencyModel
from engine.experts.path_choice import PathChoice

LAYERS, PER_TOKEN = 36, 4


def latency(cpu_us: float, copy_us: float, card_us: float = 10.0) -> LatencyModel:
    return LatencyModel("int4", 10**6, cpu_us / 1e6, 0.0, card_us / 1e6, 1, 0.0, 0.0, 1e6 / (copy_us / 1e6))


class Machine:
    """Tokens of both ways, at shares of misses that may change."""

    def __init__(self, known: LatencyModel, own_us: float, dispatch_us: float, seed: int = 0) -> None:
        self.beyond_s = {True: LAYERS * own_us / 1e6, False: LAYERS * dispatch_us / 1e6}
        self._dice, self._prices = random.Random(seed), PathChoice(known, LAYERS, PER_TOKEN, 0.0)

    def token_s(self, miss_ratio: float, *, by_itself: bool, is_noisy: bool = True) -> float:
        exact = self._prices._layers_s(miss_ratio, by_itself) + self.beyond_s[by_itself]
        return exact * (1 + 0.1 * self._dice.random() + (3.0 if self._dice.random() < 0.01 else 0) if is_noisy else 1)

    def run(self, choice: PathChoice, miss_ratio: float, tokens: int) -> float:
        """How long these take."""
        total_s = 0.0
        for _ in range(tokens):
            seconds = self.token_s(miss_ratio, by_itself=choice.by_itself)
            total_s += seconds
            choice.observe(seconds, round(miss_ratio * LAYERS * PER_TOKEN))
        return total_s


def test_where_all_miss_and_the_link_is_fast_the_dispatcher_is_taken_and_left_as_hits_come() -> None:
    """As gpt-oss-120b on a card with a fast link: at first all miss, later most hit."""
    known = latency(cpu_us=210, copy_us=300)
    choice, machine = PathChoice(known, LAYERS, PER_TOKEN, 1.0), Machine(known, 40, 160)
    assert not choice.by_itself
    machine.run(choice, 1.0, 200)
    assert not choice.by_itself
    machine.run(choice, 0.4, 300)
    assert choice.by_itself
    assert choice.miss_ratio == pytest.approx(0.4, abs=0.01)
    machine.run(choice, 1.0, 300)
    assert not choice.by_itself


def test_it_is_hardly_slower_than_the_better_way_of_nearly_any_machine() -> None:
    """Not of all: a way that is thought worse is not tried, and what held up long tokens is expected of short ones."""
    seed = random.randrange(2**32)
    dice, times = random.Random(seed), []
    for number in range(200):
        known = latency(dice.uniform(20, 2000), dice.uniform(20, 2000), dice.uniform(2, 200))
        ratios = [dice.random() for _ in range(dice.randint(1, 3))]
        choice = PathChoice(known, LAYERS, PER_TOKEN, ratios[0])
        machine = Machine(known, dice.uniform(5, 400), dice.uniform(60, 600), number)
        for ratio in ratios:
            machine.run(choice, ratio, 300)
            ways = {way: machine.token_s(ratio, by_itself=way, is_noisy=False) for way in (True, False)}
            times.append(ways[choice.by_itself] / min(ways.values()))
    times.sort()
    # About 3.5% of all such cases lose more than a tenth: of some 400 drawn ones, 5% are now and then.
    assert times[int(0.9 * len(times))] < 1.1, f"seed {seed}"
    assert times[int(0.95 * len(times))] < 1.2, f"seed {seed}"
