"""Prefetching: the predictor that gains, the fastest way to meet a miss, and answers that stay what they are."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.common.costs import CostModel
from engine.devices.device import Device
from engine.experts import misses
from engine.experts.latency import LatencyModel
from engine.experts.misses import CACHE_OFF, MIXED, WAYS, Fetched, OnCpu, Step, Way, modes
from engine.experts.prediction.predictors import Correlation, PreviousToken, Ranked
from engine.experts.prediction.prefetcher import Prefetcher, make_prefetcher
from engine.experts.prediction.target import PrefetchTimes
from engine.experts.record_source import Held
from engine.experts.shares import Estimate
from tests.engine.hybrid_layers import Layers, routing
from tests.engine.slots_in_time import PlantedRoutes, SlotsInTime

LAYERS, EXPERTS, WIDTH = 6, 16, 2
FAST = 0.3e-3
SLOW = 50e-3


def tier_of(slots: int = 40, arrival_s: float = FAST) -> SlotsInTime:
    return SlotsInTime(slots, EXPERTS, arrival_s=arrival_s, miss_s=1e-3)


def prefetcher_of(tier: SlotsInTime, choice: str = "auto") -> Prefetcher:
    predictors = [PreviousToken(LAYERS), Correlation(LAYERS, EXPERTS, 2 * WIDTH)]
    return Prefetcher(
        tier,
        predictors,
        lambda: tier.times,
        layers=LAYERS,
        experts=EXPERTS,
        per_token=WIDTH,
        choice=choice,
        clock=tier.clock,
    )


def run(tier: SlotsInTime, prefetcher: Prefetcher | None, routes: PlantedRoutes, steps: int = 600) -> float:
    """Seconds of the last half of the steps."""
    half_s = 0.0
    for number in range(steps):
        if number == steps // 2:
            half_s = tier.now_s
        for layer, experts in enumerate(routes.step()):
            tier.want(layer, experts)
            if prefetcher is not None:
                prefetcher.observe(layer, experts)
    return tier.now_s - half_s


def correlated(seed: int = 3) -> PlantedRoutes:
    return PlantedRoutes(LAYERS, EXPERTS, WIDTH, follows=0.9, seed=seed)


def test_what_gains_is_adopted_and_does_gain() -> None:
    plain_s = run(tier_of(), None, correlated())
    tier = tier_of()
    prefetcher = prefetcher_of(tier)
    with_s = run(tier, prefetcher, correlated())
    report = prefetcher.report()
    assert report.adopted == "correlation"
    assert with_s < 0.8 * plain_s
    gains = {each.name: each for each in report.predictors}
    assert gains["correlation"].gain_s > max(0.0, gains["previous"].gain_s)
    assert gains["correlation"].hit_rate > 0.6
    assert report.used > report.wasted
    assert report.prefetched >= report.used + report.wasted
    # What it says it gains is about what it gained.
    assert gains["correlation"].gain_s == pytest.approx((plain_s - with_s) / 300, rel=0.6)


@pytest.mark.parametrize(
    ("follows", "arrival_s"),
    [(0.0, FAST), (0.9, SLOW)],
    ids=["nothing to learn", "a link too slow"],
)
def test_nobody_is_adopted_where_nobody_gains(follows: float, arrival_s: float) -> None:
    routes = [PlantedRoutes(LAYERS, EXPERTS, WIDTH, follows=follows) for _ in range(2)]
    plain_s = run(tier_of(arrival_s=arrival_s), None, routes[0])
    tier = tier_of(arrival_s=arrival_s)
    prefetcher = prefetcher_of(tier)
    assert run(tier, prefetcher, routes[1]) <= 1.02 * plain_s
    assert prefetcher.adopted is None


def test_who_no_longer_gains_is_dropped() -> None:
    tier = tier_of()
    prefetcher = prefetcher_of(tier)
    run(tier, prefetcher, correlated())
    assert prefetcher.adopted == "correlation"
    tier.times = replace(tier.times, miss_s=0.0)  # misses cost nothing any more
    run(tier, prefetcher, correlated(), steps=200)
    assert prefetcher.adopted is None


@given(counts=st.lists(st.integers(1, EXPERTS), min_size=LAYERS, max_size=LAYERS), seed=st.integers(0, 99))
def test_layers_of_different_sizes_are_asked_for_what_they_have(counts: list[int], seed: int) -> None:
    draw = random.Random(seed)

    class Anything(PreviousToken):
        def predict(self, layer: int) -> Ranked:
            return [(expert, 0.9) for expert in draw.sample(range(EXPERTS + 4), EXPERTS + 4)]

    class Tier(SlotsInTime):
        def absent(self, layer: int, experts: Sequence[int]) -> list[int]:
            assert all(expert < counts[layer] for expert in experts)
            return super().absent(layer, experts)

    tier = Tier(40, EXPERTS, arrival_s=FAST, miss_s=1e-3)
    prefetcher = Prefetcher(
        tier,
        [Anything(LAYERS)],
        lambda: tier.times,
        layers=LAYERS,
        experts=counts,
        per_token=WIDTH,
        choice="previous",
        clock=tier.clock,
    )
    for _ in range(40):
        for layer, count in enumerate(counts):
            wanted = draw.sample(range(count), min(count, WIDTH))
            tier.want(layer, wanted)
            prefetcher.observe(layer, wanted)
    assert prefetcher.report().prefetched or sum(counts) < 40


def test_off_is_no_prefetcher() -> None:
    tier = tier_of()
    for choice in ("off", "gate", "mlp"):  # the last two have nothing to work with here
        made = make_prefetcher(tier, lambda: tier.times, layers=LAYERS, experts=EXPERTS, per_token=WIDTH, choice=choice)
        assert made is None
    made = make_prefetcher(tier, lambda: tier.times, layers=LAYERS, experts=EXPERTS, per_token=WIDTH)
    assert [each.name for each in made.report().predictors] == ["previous", "correlation"]
    made.close()


def test_it_looks_farther_ahead_when_experts_take_longer_to_arrive() -> None:
    for arrival_s, least in ((0.2e-3, 1), (5e-3, 3)):
        tier = SlotsInTime(60, EXPERTS, arrival_s=arrival_s, miss_s=0.2e-3)
        prefetcher = prefetcher_of(tier)
        run(tier, prefetcher, correlated(), steps=200)
        assert prefetcher.ahead >= least
        assert prefetcher.ahead == 1 or least > 1


class Oracle:
    """Predicts what it is told to."""

    name = "correlation"
    learns = False
    beside_s = 0.0

    def __init__(self) -> None:
        self.says: dict[int, Ranked] = {}

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        pass

    def predict(self, layer: int) -> Ranked:
        return self.says.get(layer, ())


@given(st.integers(0, 2**31), st.integers(2, 30), st.sampled_from([0.1e-3, FAST, 3e-3]), st.integers(1, 16))
def test_nothing_wanted_or_predicted_is_offered_for_eviction(
    seed: int, slots: int, arrival_s: float, experts: int
) -> None:
    dice, tier, oracle = random.Random(seed), tier_of(slots, arrival_s), Oracle()
    prefetcher = Prefetcher(
        tier,
        [oracle],
        lambda: tier.times,
        layers=LAYERS,
        experts=EXPERTS,
        per_token=WIDTH,
        choice="correlation",
        clock=tier.clock,
    )
    wanted: list[set[tuple[int, int]]] = [set(), set()]
    predicted: dict[int, set[tuple[int, int]]] = {}
    for _ in range(dice.randint(1, 25)):
        wanted.append(set())
        predicted = {layer: said for layer, said in predicted.items() if layer < prefetcher.ahead}
        for layer in range(dice.choice((LAYERS, LAYERS, dice.randint(1, LAYERS)))):  # a step may be cut short
            chosen = dice.sample(range(experts), min(experts, dice.randint(1, 3)))
            said = {coming: dice.sample(range(experts), min(experts, 3)) for coming in range(LAYERS)}
            oracle.says = {coming: [(expert, 0.5) for expert in said[coming]] for coming in said}
            tier.want(layer, chosen)
            wanted[-1] |= {(layer, expert) for expert in chosen}
            coming = (layer + prefetcher.ahead) % LAYERS
            predicted.pop(layer, None)
            predicted[coming] = {(coming, expert) for expert in said[coming]}
            tier.offered = []
            prefetcher.observe(layer, chosen)
            offered = set(tier.offered)
            assert not offered & (wanted[-1] | wanted[-2])
            assert not offered & set().union(*predicted.values())
            assert len(offered) == len(tier.offered)


@given(
    st.floats(0, 1e-2),
    st.floats(1e-6, 1e-2),
    st.floats(0, 1e-2),
    st.floats(0, 5e-3),
    st.booleans(),
    st.integers(0, 5),
)
def test_room_is_for_those_that_save_something(
    left_s: float, arrival_s: float, miss_s: float, hit_s: float, late_saves: bool, backlog: int
) -> None:
    times = PrefetchTimes(1000, arrival_s, miss_s, hit_s, late_saves, 1.0)
    room = times.room(left_s, backlog * 1000)
    assert room >= 0
    if room:
        assert times.saved_s(0, left_s, backlog * 1000) > -1e-12
    assert times.saved_s(room, left_s, backlog * 1000) <= 1e-9


def toy(base: type[Way], seconds: float) -> tuple[type[Way], list[int]]:
    """A way that meets one expert after the other and says that each takes so long; what it has met."""
    met: list[int] = []

    class OneByOne(base):  # type: ignore[misc, valid-type]
        name = "one by one"

        def estimate(self, step: Step, busy_s: float) -> Estimate:
            del step, busy_s
            return Estimate(lambda _tokens: seconds, keeps_caller=self.keeps_caller)

        def serve(self, step: Step, experts: Sequence[int], held: Held) -> None:
            met.extend(experts)
            for expert in experts:
                super().serve(step, [expert], held)

    return OneByOne, met


@pytest.mark.parametrize("base", [OnCpu, Fetched])
@pytest.mark.parametrize("seconds", [0.0, 1e3])
def test_a_new_way_is_used_where_it_is_the_fastest(
    device: Device, monkeypatch: pytest.MonkeyPatch, base: type[Way], seconds: float
) -> None:
    # How long anything took here and now must not decide.
    monkeypatch.setattr(CostModel, "observe", lambda *_: None)
    monkeypatch.setattr(LatencyModel, "observe_gpu", lambda *_: None)
    monkeypatch.setattr(LatencyModel, "sides", lambda *_: {})
    way, met = toy(base, seconds)
    monkeypatch.setattr(misses, "WAYS", [*WAYS, way])
    assert modes() == [MIXED, "cpu", "fetch", "one by one", CACHE_OFF]
    answers = []
    for mode in modes():
        generator = torch.Generator().manual_seed(7)
        met.clear()
        with Layers(device, slots=4, mode=mode, policy="lru") as layers:
            results = []
            for count in (1, 1, 4, 1, 70):
                results.append(layers.check(0, routing(generator, count, 3)))
                layers.cache.wait()
            answers.append(torch.cat(results))
            counters = layers.cache.counters
            missed = counters.misses + counters.prefill_lookups - counters.prefill_hits
            if mode == "one by one" or (mode == MIXED and not seconds):
                assert len(met) == missed > 0
                counted = counters.on_cpu + counters.prefill_on_cpu
                assert counted == (missed if base.keeps_caller else 0)
            elif mode != CACHE_OFF or seconds:
                assert met == []
            assert layers.cache.resize(0) == 0
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_an_unknown_way_is_an_error(device: Device) -> None:
    with Layers(device) as layers, pytest.raises(ValueError, match="by magic"):
        layers.layers[0].serve_by("by magic")
