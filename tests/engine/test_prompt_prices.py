"""A prompt's share of experts for the processor, where all that it takes to let the others be fetched has its price.

The card's time is modelled, and the processor's, too: every call of the card's driver keeps it from computing.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.common import clock
from engine.devices.clocked import open_clocked
from engine.experts.latency import LatencyModel
from engine.experts.prompt_choice import PromptChoice
from engine.experts.shares import Estimate, ends_s, split_among
from engine.hardware.profiles import DeviceProfile
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.runtime.load.timed_card import timed
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
    with open_clocked(profile, is_fixed=True) as device:
        layers = TimedLayers(device, slots=2, staging=8, mode=mode)
        with layers:
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
            generator = torch.Generator().manual_seed(3)
            took_s = 0.0
            for number in range(12):
                begun_s = clock.now()
                for layer in range(LAYERS):
                    layers.check(layer, routing(generator, TOKENS, 3))
                device.compute_stream.synchronize()
                took_s += (clock.now() - begun_s) if number >= 8 else 0.0
            return took_s


@pytest.mark.parametrize(
    ("call_us", "link_us", "cpu_us"),
    [
        (100.0, 100.0, 150.0),  # the calls that it takes to fetch one keep the processor longer than computing it
        (100.0, 10.0, 300.0),
        (100.0, 200.0, 300.0),
        (5.0, 200.0, 300.0),
        (5.0, 1000.0, 100.0),
    ],
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


def test_a_processor_that_is_kept_too_long_to_compute_gets_nothing() -> None:
    # 51 experts come in 52 us each, and one takes 600 us here: four would fit beside the link
    misses = [(expert, 32) for expert in range(51)]
    other = Estimate(lambda _tokens: 2e-6, bring_s=52e-6)
    first = Estimate(lambda _tokens: 600e-6, keeps_caller=True, entry_s=50e-6)
    assert len(split_among(misses, [first, other])[0]) == 4
    other = Estimate(lambda _tokens: 2e-6, bring_s=52e-6, caller_s=45e-6)
    assert not split_among(misses, [first, other])[0]


def test_as_many_experts_come_ahead_as_the_link_has_time_for() -> None:
    latency = LatencyModel("test", 4096, 1e-3, 0.0, 1e-6, 512, 0.0, 0.0, 4096 / 190e-6)
    assert latency.fit_between_layers(0) == 0  # nothing is known yet
    latency.observe_between(1e-3)
    assert [latency.fit_between_layers(arriving) for arriving in (0, 3, 9)] == [5, 2, 0]


def taken(choice: PromptChoice, layers: int, shared_s: float, alone_s: float) -> list[bool]:
    """The ways of layers that take 9 ms with the processor and 7 without, whatever their prices, but for a few."""
    ways = []
    for number in range(layers):
        way = choice.takes_part(shared_s, alone_s)
        took_s = 30e-3 if number % 10 == 0 else 9e-3 if way else 7e-3  # something else has run meanwhile
        choice.observe(took_s, shared_s if way else alone_s, is_shared=way)
        ways.append(way)
    return ways


def test_what_layers_took_overrules_their_prices() -> None:
    choice = PromptChoice()
    ways = taken(choice, 300, shared_s=2e-3, alone_s=3e-3)
    assert ways[0]
    assert sum(ways) < 25
    assert any(ways[100:])  # it is tried again
    assert all(taken(choice, 10, shared_s=2e-3, alone_s=9e-3))  # where fetching takes so long, it is not


def test_a_way_that_is_thought_much_dearer_is_not_tried() -> None:
    choice = PromptChoice()
    assert all(taken(choice, 50, shared_s=2e-3, alone_s=20e-3))


def test_layers_are_priced_less_often_while_all_misses_are_fetched() -> None:
    choice = PromptChoice()
    assert not choice.rests(512)
    choice.decided(512, is_shared=False)
    assert [choice.rests(512) for _ in range(2)] == [True, False]
    choice.decided(512, is_shared=False)
    assert not choice.rests(200)
    assert not choice.rests(1100)
    assert [choice.rests(512) for _ in range(4)] == [True, True, True, False]
    choice.decided(512, is_shared=False)
    choice.decided(512, is_shared=True)
    assert not choice.rests(512)
