"""A prompt's share of experts for the processor, where all that it takes to let the others be fetched has its price.

The card's time is modelled, and the processor's, too: every call of the card's driver keeps it from computing.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.common import clock
from engine.common.costs import Cost
from engine.devices.emulated import open_emulated
from engine.experts.latency import LatencyModel
from engine.experts.shares import Estimate, PromptChoice, PromptWay, ends_s, prompt_prices, split_among
from engine.hardware.profiles import DeviceProfile
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.runtime.load.timed_card import timed
from tests.combinations import some
from tests.engine.hybrid_layers import HIDDEN, LAYERS, Layers, routing

RECORD = 4 * 3 * HIDDEN * 8
"""Bytes of an expert."""
TOKENS = 96
BEST = 1.05
"""Times what the better of the two fixed ways takes: a layer of six experts cannot be divided finely."""


class TimedLayers(Layers):
    """Experts whose time is modelled on both sides, with rates that are known."""

    def kernel(self, records: LayerRecords) -> ExpertKernel:
        return timed(super().kernel(records), records, self.device, on_card=self.device.memory.holds(records.pieces[0]))


def card(call_us: float, link_us: float, cpu_us: float) -> DeviceProfile:
    """One whose link takes so long for an expert, and its processor for one with a few tokens."""
    return DeviceProfile(
        "prices",
        "for tests",
        vram_bytes=2**24,
        link_h2d_gbps=RECORD / link_us / 1e3,
        link_d2h_gbps=RECORD / link_us / 1e3,
        link_latency_us=1.0,
        card_gbps=1000.0,
        card_tflops=100.0,
        launch_us=1.0,
        call_us=call_us,
        cpu_gbps=RECORD / cpu_us / 1e3,
        cpu_tflops=1.0,
    )


def prompt_s(profile: DeviceProfile, mode: str) -> float:
    """Seconds of a prompt's layers, after others from which prices were learnt."""
    with timed_layers(profile, mode) as layers:
        took_s = 0.0
        for number in range(12):
            begun_s = clock.now()
            read(layers, number)
            layers.device.compute_stream.synchronize()
            took_s += (clock.now() - begun_s) if number >= 8 else 0.0
        return took_s


@contextmanager
def timed_layers(profile: DeviceProfile, mode: str = "mixed") -> Iterator[TimedLayers]:
    """Layers whose latencies are known, and each of which tells of the one before, as in a model of many."""
    with open_emulated(profile, is_fixed=True) as device, TimedLayers(device, slots=2, staging=8, mode=mode) as layers:
        latency = LatencyModel(
            "test",
            RECORD,
            cpu_base_s=profile.call_us / 1e6 + RECORD / (profile.cpu_gbps * 1e9),
            cpu_token_s=0.0,
            gpu_flat_s=profile.launch_us / 1e6,
            gpu_knee_tokens=512,
            gpu_token_s=0.0,
            link_latency_s=profile.link_latency_us / 1e6,
            link_bytes_per_s=profile.link_h2d_gbps * 1e9,
        )
        for layer in layers.layers:
            layer.latency = latency
        layers.layers[-1].after = layers.layers[0]
        yield layers


def read(layers: Layers, seed: int) -> None:
    """One prompt."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        layers.check(layer, routing(generator, TOKENS, 3))


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    ("call_us", "link_us", "cpu_us"),
    some(
        [
            (100.0, 100.0, 150.0),  # the calls that it takes to fetch one keep the processor longer than computing it
            (100.0, 10.0, 300.0),
            (100.0, 200.0, 300.0),
            (5.0, 200.0, 300.0),
            (5.0, 1000.0, 100.0),
        ],
        every=4,
    ),
)
def test_neither_way_alone_is_faster(call_us: float, link_us: float, cpu_us: float) -> None:
    profile = card(call_us, link_us, cpu_us)
    assert prompt_s(profile, "mixed") <= BEST * min(prompt_s(profile, "fetch"), prompt_s(profile, "cpu"))


_seconds = st.floats(1e-6, 1e-2)


@given(
    tokens=st.lists(st.integers(1, 64), min_size=1, max_size=24),
    host=_seconds,
    bring_s=_seconds,
    caller_s=st.floats(0, 1e-2),
    entry_s=st.floats(0, 1e-2),
)
@settings(suppress_health_check=[HealthCheck.differing_executors])
def test_no_share_ends_later_than_one_way_alone(
    tokens: list[int], host: float, bring_s: float, caller_s: float, entry_s: float
) -> None:
    first = Estimate(lambda count: host * (4 + count), keeps_caller=True, entry_s=entry_s)
    other = Estimate(lambda _count: 1e-6, bring_s, caller_s=caller_s)
    here, there = split_among(list(enumerate(tokens)), [first, other])
    assert sorted([*here, *there]) == list(range(len(tokens)))

    def took_s(here: Sequence[int], there: Sequence[int]) -> float:
        return ends_s([first, other], [here, sorted(there, reverse=True)])

    shared_s = took_s([tokens[key] for key in here], [tokens[key] for key in there])
    one_way_s = min(took_s(tokens, []), took_s([], tokens))
    assert shared_s <= one_way_s / 0.97 * (1 + 1e-6)


def test_as_many_experts_come_ahead_as_the_link_has_time_for() -> None:
    latency = LatencyModel("test", 4096, 1e-3, 0.0, 1e-6, 512, 0.0, 0.0, 4096 / 190e-6)
    assert latency.fit_between_layers(0) == 0  # nothing is known yet
    latency.costs.observe(Cost.BETWEEN, 1, 1e-3)
    assert [latency.fit_between_layers(arriving) for arriving in (0, 3, 9)] == [5, 2, 0]


SHARED, FETCHED, ON_CPU = PromptWay.SHARED, PromptWay.FETCHED, PromptWay.ON_CPU


@given(
    tokens=st.lists(st.integers(1, 64), min_size=1, max_size=24),
    ahead=st.sets(st.integers(0, 23)),
    host=_seconds,
    bring_s=_seconds,
    caller_s=st.floats(0, 1e-2),
    entry_s=st.floats(0, 1e-2),
    busy_s=st.floats(0, 1e-2),
)
@settings(suppress_health_check=[HealthCheck.differing_executors])
def test_each_way_of_a_prompt_has_a_price(
    tokens: list[int], ahead: set[int], host: float, bring_s: float, caller_s: float, entry_s: float, busy_s: float
) -> None:
    first = Estimate(lambda count: host * (4 + count), keeps_caller=True, entry_s=entry_s)
    other = Estimate(lambda _count: 1e-6, bring_s, busy_s=busy_s, caller_s=caller_s)
    misses = list(enumerate(tokens))
    prices, (here, there) = prompt_prices(misses, ahead, [first, other], busy_s)
    assert sorted([*here, *there]) == list(range(len(tokens)))
    assert not ahead.intersection(here)  # they are there, or almost
    assert (SHARED in prices) == bool(here and there)
    assert prices.keys() >= {FETCHED, ON_CPU}
    assert prices[ON_CPU] == pytest.approx(max(busy_s, entry_s + sum(map(first.seconds, tokens))))
    assert all(price >= busy_s for price in prices.values())
    if SHARED in prices and not ahead:
        assert prices[SHARED] <= min(prices[FETCHED], prices[ON_CPU]) / 0.97 * (1 + 1e-6)


class Truth:
    """Layers that take so many milliseconds beyond their prices, and now and then much more.

    Args:
        held_up: share of layers that something else holds up.

    Attributes:
        busy_ms: what every layer takes more, while it is set.
    """

    def __init__(
        self, choice: PromptChoice, beyond_ms: dict[PromptWay, float], seed: int = 0, held_up: float = 0.05
    ) -> None:
        self.choice, self.beyond_ms, self.tokens, self.busy_ms = choice, beyond_ms, 512, 0.0
        self._dice, self._held_up = random.Random(seed), held_up

    def layers(self, count: int, prices_ms: dict[PromptWay, float]) -> list[PromptWay]:
        """The ways of so many layers at these prices."""
        ways = []
        for _ in range(count):
            way = self.choice.rests(self.tokens)
            if way is None:
                way = self.choice.choose(self.tokens, prices_ms)
                took_ms = prices_ms[way] + self.beyond_ms[way] * self._dice.uniform(0.95, 1.05)
                held_up_ms = 20 if self._dice.random() < self._held_up else 0  # something else has run meanwhile
                self.choice.observe(self.tokens, way, took_ms + held_up_ms + self.busy_ms, prices_ms[way])
            ways.append(way)
        return ways


@given(prices=st.tuples(*[st.floats(2, 2.2)] * 3), beyond=st.tuples(*[st.floats(0.5, 3)] * 3))
def test_what_layers_took_overrules_their_prices(prices: tuple[float, ...], beyond: tuple[float, ...]) -> None:
    """On average: where chance holds up the few trials of a way, one run may not find it."""
    prices_ms, beyond_ms = (dict(zip(PromptWay, each, strict=True)) for each in (prices, beyond))
    runs = (Truth(PromptChoice(), beyond_ms, seed).layers(600, prices_ms)[60:] for seed in range(16))
    ways = [way for run in runs for way in run]
    total_ms = sum(prices_ms[way] + beyond_ms[way] for way in ways)
    best_ms = min(prices_ms[way] + beyond_ms[way] for way in PromptWay)
    assert total_ms <= 1.15 * best_ms * len(ways)


@pytest.mark.parametrize("layers", [4, 9, 15, 50, 200])
def test_a_program_that_is_busy_for_a_while_changes_nothing_for_long(layers: int) -> None:
    """It meets one way after the other, so that all seem to take longer than they do."""
    prices_ms = dict.fromkeys(PromptWay, 2.0)
    for best in PromptWay:
        for seed in range(8):
            truth = Truth(PromptChoice(), {way: 0.5 if way is best else 3.0 for way in PromptWay}, seed)
            truth.layers(100, prices_ms)
            truth.busy_ms = 10.0
            truth.layers(layers, prices_ms)
            truth.busy_ms = 0.0
            assert truth.layers(600, prices_ms)[100:].count(best) > 400, (best, seed)


@given(data=st.data())
@settings(max_examples=8, suppress_health_check=[HealthCheck.differing_executors])
def test_each_way_computes_the_same_whatever_the_layer_before_has_left(data: st.DataObject) -> None:
    with open_emulated(card(5.0, 100.0, 100.0), is_fixed=True) as device:
        layers = Layers(device, slots=data.draw(st.integers(1, 6)), staging=data.draw(st.integers(1, 8)))
        with layers, pytest.MonkeyPatch.context() as patched:
            patched.setattr(PromptChoice, "rests", lambda *_: None)
            patched.setattr(PromptChoice, "choose", lambda _, __, prices: data.draw(st.sampled_from(list(prices))))
            patched.setattr(PromptChoice, "way", lambda *_: data.draw(st.sampled_from(PromptWay)))
            for seed in range(3):
                read(layers, seed)
