"""One chooser for all: the best way under noise, for tokens as for kernels."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.choice import TRIALS, Choice
from engine.experts.latency import LatencyModel
from engine.experts.path_choice import PathChoice

ARMS = ("a", "b", "c")


class World:
    """Steps that take `factors` times what is predicted, with noise, and now and then something in between."""

    def __init__(self, choice: Choice[str], factors: dict[str, float], seed: int, noise: float = 0.1) -> None:
        self.choice, self.factors, self.dice, self.noise = choice, factors, random.Random(seed), noise
        self.busy = 1.0
        """Factor on all steps."""

    def run(self, steps: int, predicted: dict[str, float]) -> list[str]:
        taken = []
        for _ in range(steps):
            arm = self.choice.take(predicted)
            seconds = predicted[arm] * self.factors[arm] * self.busy * self.dice.lognormvariate(0, self.noise)
            if self.dice.random() < 0.02:
                seconds *= self.dice.uniform(2, 10)  # held up
            self.choice.observe(arm, seconds, predicted[arm])
            taken.append(arm)
        return taken


_factors = st.fixed_dictionaries({arm: st.floats(0.5, 2.0) for arm in ARMS})
_predicted = st.fixed_dictionaries({arm: st.floats(1e-3, 1.5e-3) for arm in ARMS})
_seeds = st.integers(0, 10_000)


@given(_factors, _predicted, _seeds, st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_it_ends_with_a_way_that_is_about_the_best(
    factors: dict[str, float], predicted: dict[str, float], seed: int, warm: int
) -> None:
    choice = Choice(ARMS, warm=warm)
    World(choice, factors, seed).run(4000, predicted)
    takes = {arm: factors[arm] * predicted[arm] for arm in ARMS}
    assert choice.present is not None
    assert takes[choice.present] <= 1.15 * min(takes.values())


@given(_factors, _predicted, _seeds, st.integers(1, 3000), st.integers(0, 3), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_no_more_than_a_fiftieth_is_tried(
    factors: dict[str, float], predicted: dict[str, float], seed: int, steps: int, warm: int, run: int
) -> None:
    choice = Choice(ARMS, warm=warm, run=run)
    World(choice, factors, seed).run(steps, predicted)
    assert choice.steps == steps
    assert choice.trials <= TRIALS * steps


@given(_seeds, st.sampled_from(ARMS))
@settings(max_examples=15, deadline=None)
def test_a_change_is_followed(seed: int, best: str) -> None:
    world = World(Choice(ARMS), {**dict.fromkeys(ARMS, 1.4), "a": 1.0}, seed)
    even = dict.fromkeys(ARMS, 1e-3)
    world.run(1000, even)
    assert world.choice.present == "a"
    world.factors = {arm: 1.0 if arm == best else 1.6 for arm in ARMS}
    world.run(6000, even)
    assert world.choice.present == best


@given(_seeds, st.floats(1.2, 10.0), st.integers(10, 600))
@settings(max_examples=30, deadline=None)
def test_a_busy_phase_does_not_flip_it(seed: int, slower: float, steps: int) -> None:
    world = World(Choice(ARMS), {"a": 1.0, "b": 1.25, "c": 1.5}, seed)
    even = dict.fromkeys(ARMS, 1e-3)
    world.run(1000, even)
    assert world.choice.present == "a"
    world.busy = slower
    for _ in range(steps):
        world.run(1, even)
        assert world.choice.present == "a"
    world.busy = 1.0
    world.run(steps, even)
    assert world.choice.present == "a"


def test_what_a_busy_machine_does_to_one_way_alone_is_not_learnt() -> None:
    busy = False
    world = World(Choice(ARMS, is_busy=lambda: busy), {"a": 1.0, "b": 1.2, "c": 1.3}, 1)
    even = dict.fromkeys(ARMS, 1e-3)
    world.run(1000, even)
    busy, world.factors["a"] = True, 3.0
    world.run(5, even)  # a trial may have begun
    assert set(world.run(1000, even)) == {"a"}


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_say_nothing(seconds: float) -> None:
    choice = Choice(ARMS)
    choice.take(dict.fromkeys(ARMS, 1.0))
    choice.observe("a", seconds, 1.0)
    assert choice.price("a", 1.0) == 1.0


@given(_factors, _seeds, st.floats(1e-6, 1e3))
@settings(max_examples=15, deadline=None)
def test_predictions_may_only_say_what_is_thought_better(factors: dict[str, float], seed: int, unit: float) -> None:
    choice = Choice(ARMS, in_common=1.0)
    World(choice, {arm: unit * factor for arm, factor in factors.items()}, seed).run(4000, dict.fromkeys(ARMS, 1.0))
    assert choice.present is not None
    assert factors[choice.present] <= 1.15 * min(factors.values())


def test_a_way_that_is_there_no_more_is_left() -> None:
    world = World(Choice(ARMS), {"a": 1.0, "b": 1.3, "c": 1.6}, 4)
    world.run(300, dict.fromkeys(ARMS, 1e-3))
    assert world.run(200, {"b": 1e-3, "c": 1e-3})[-100:].count("b") >= 96
    assert world.choice.present == "b"
    world.run(1500, dict.fromkeys(ARMS, 1e-3))
    assert world.choice.present == "a"


def test_ways_that_take_long_to_change_to_are_hardly_ever_tried() -> None:
    """As where each change captures a graph, which takes as long as a hundred steps."""
    choice, changes, last, total_s = Choice(ARMS[:2], warm=2), 0, "a", 0.0
    even = dict.fromkeys(ARMS[:2], 1e-3)
    for _ in range(20_000):
        arm = choice.take(even)
        seconds = 1e-3 if arm == last else 0.1
        changes, last, total_s = changes + (arm != last), arm, total_s + seconds
        choice.observe(arm, seconds, 1e-3)
    assert 2 <= changes <= 12
    assert total_s <= 1.03 * (20_000 + 200) * 1e-3


def test_the_prediction_decides_first_and_follows_what_is_asked() -> None:
    choice = Choice(ARMS)
    assert choice.take({"a": 2.0, "b": 1.0, "c": 3.0}) == "b"
    choice.observe("b", 1.0, 1.0)
    assert choice.take({"a": 0.5, "b": 1.0, "c": 3.0}) == "a"
    assert choice.take({"b": 1.0, "c": 0.9}) == "c"  # there is no a this time


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
