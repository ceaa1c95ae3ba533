"""The emulated card with a clock of its own: what it does, and when by its data sheet."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.common import clock
from engine.common.clock import OwnClock
from engine.devices.clocked import open_clocked
from engine.devices.device import CopyRecord, Device, Direction
from engine.devices.emulated import open_emulated
from engine.devices.memory_budget import MemoryCategory
from engine.devices.opening import open_devices
from engine.hardware.profiles import DeviceProfile, emulated_cards, has_fixed_host, timed_profiles
from tests.device_contract import DeviceContract

US = 1e-6
MIB = 2**20
about = functools.partial(pytest.approx, abs=1e-9)
"""Differences of times since the machine started: after a day they have eleven digits behind the point at most."""
CARD = DeviceProfile(
    "sheet",
    "for tests",
    vram_bytes=2**26,
    link_h2d_gbps=1.0,
    link_d2h_gbps=0.5,
    link_latency_us=10.0,
    card_gbps=100.0,
    card_tflops=1.0,
    launch_us=5.0,
    call_us=0.0,
    cpu_gbps=10.0,
    cpu_tflops=0.1,
)


class TestClocked(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with open_clocked(replace(CARD, call_us=2.0)) as device:
            yield device


class TestClockedFixedHost(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with open_clocked(CARD, is_fixed=True) as device:
            yield device


@pytest.fixture
def card() -> Iterator[Device]:
    with open_clocked(CARD, is_fixed=True) as device:
        yield device


def big(device: Device, nbytes: int, **how: Direction) -> tuple[torch.Tensor, torch.Tensor]:
    return device.memory.allocate(nbytes, MemoryCategory.STAGING), torch.zeros(nbytes, dtype=torch.uint8)


def kernel(device: Device, nbytes: float, flops: float = 0.0) -> None:
    assert device.meter is not None
    device.meter.kernel(nbytes, flops)


def test_the_system_s_clock_is_back_once_the_card_is_closed() -> None:
    before = clock.now
    with open_clocked(CARD), open_clocked(CARD, 1):
        assert clock.own is not None
        assert clock.now == clock.own.now
    assert clock.now is before
    assert clock.own is None


def test_copies_take_the_latency_and_their_bytes_one_after_the_other(card: Device) -> None:
    there, here = big(card, MIB)
    begun_s = clock.now()
    first, second = (card.h2d_stream.copy(there, here) for _ in range(2))
    assert not first.done()
    assert clock.now() == begun_s
    second.wait()
    one_s = 10 * US + MIB / 1e9
    assert clock.now() - begun_s == about(2 * one_s)
    assert (first.started_s - begun_s, first.ended_s - begun_s) == about((0.0, one_s))
    assert second.started_s == first.ended_s


def test_both_directions_carry_at_once(card: Device) -> None:
    there, here = big(card, MIB)
    begun_s = clock.now()
    down = card.d2h_stream.copy(here, there)
    up = card.h2d_stream.copy(there, here)
    card.synchronize()
    assert up.ended_s - begun_s == about(10 * US + MIB / 1e9)
    assert down.ended_s - begun_s == about(10 * US + MIB / 0.5e9)


def test_a_small_copy_overtakes_a_large_one_and_delays_it(card: Device) -> None:
    there, here = big(card, MIB)
    begun_s = clock.now()
    large = card.h2d_stream.copy(there, here)
    assert clock.own is not None
    clock.own.advance(100 * US)
    small = card.small_copy_stream.copy(there[:1000], here[:1000], direction=Direction.H2D)
    small.wait()
    needed_s = 10 * US + 1000 / 1e9
    assert clock.now() - begun_s == about(100 * US + needed_s)
    large.wait()
    assert large.ended_s - begun_s == about(10 * US + MIB / 1e9 + needed_s)


def test_a_kernel_takes_its_launch_and_the_longer_of_bytes_and_arithmetic(card: Device) -> None:
    begun_s = clock.now()
    read = card.compute_stream.submit(lambda: kernel(card, 1e6, 1e6))
    computed = card.compute_stream.submit(lambda: kernel(card, 1e6, 1e9))
    empty = card.compute_stream.submit(lambda: None)
    empty.wait()
    assert read.ended_s - begun_s == about(5 * US + 1e6 / 100e9)
    assert computed.ended_s - read.ended_s == about(5 * US + 1e9 / 1e12)
    assert empty.ended_s - computed.ended_s == about(5 * US)


def test_a_layer_by_hand(card: Device) -> None:
    """Two hits beside an expert that is fetched, and one on the processor meanwhile."""
    there, here = big(card, MIB)
    meter = card.meter
    assert meter is not None
    begun_s = clock.now()
    arrived = card.h2d_stream.copy(there, here)
    hits = card.compute_stream.submit(lambda: kernel(card, 2 * MIB))
    card.compute_stream.wait(arrived)
    fetched = card.compute_stream.submit(lambda: kernel(card, MIB))
    with meter.on_processor(MIB, 1.0):
        pass
    assert clock.now() - begun_s == about(MIB / 10e9)
    assert hits.done()
    assert not fetched.done()
    fetched.wait()
    one_s = 10 * US + MIB / 1e9
    assert hits.ended_s - begun_s == about(5 * US + 2 * MIB / 100e9)
    assert fetched.started_s == arrived.ended_s
    assert clock.now() - begun_s == about(one_s + 5 * US + MIB / 100e9)


def test_the_caller_s_operators_are_the_card_s_and_the_host_goes_on_beside_them(card: Device) -> None:
    meter = card.meter
    assert meter is not None
    begun_s = clock.now()
    with meter.on_card():
        meter.kernel(100e3, 0)
        with meter.on_host(), meter.on_processor(2e3, 0):
            pass
        meter.kernel(100e3, 0)
    # The second kernel is issued when the processor has done its part, while the first one runs.
    assert clock.now() - begun_s == about(2 * (5 * US + 1 * US))


def test_waiting_with_a_limit_takes_as_long_as_the_limit(card: Device) -> None:
    there, here = big(card, MIB)
    event = card.h2d_stream.copy(there, here)
    begun_s = clock.now()
    assert not event.wait(1e-4)
    assert clock.now() - begun_s == about(1e-4)
    assert event.wait(1.0)


def test_real_time_passes_only_outside_the_card() -> None:
    real = [0.0]
    own = OwnClock(source=lambda: real[0])
    real[0] = 1.0
    assert own.now() == 1.0
    with own.stopped():
        real[0] = 2.0
        with own.going_on():
            real[0] = 2.5
    assert own.now() == 1.5
    with own.paced(0.5):
        real[0] = 3.5
        assert own.now() == 2.0
    own.advance_to(1.0)
    assert own.now() == 2.0
    own.advance_to(7.0)
    real[0] = 4.0
    assert own.now() == 7.5
    assert own.now_ns() == 7_500_000_000


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), st.sampled_from(["h2d", "d2h", "small up", "small down"]), st.integers(1, 10**6)),
        st.tuples(st.just("kernel"), st.just("compute"), st.integers(0, 10**6)),
        st.tuples(st.just("wait"), st.sampled_from(["compute", "h2d", "d2h"]), st.integers(0, 30)),
        st.tuples(st.just("host"), st.just(""), st.integers(0, 1000)),
        st.tuples(st.just("sync"), st.just(""), st.integers(0, 30)),
    ),
    max_size=30,
)


@given(STEPS)
def test_no_event_before_its_cause_and_no_link_beyond_its_rate(steps: list[tuple[str, str, int]]) -> None:
    with open_clocked(replace(CARD, call_us=1.0), is_fixed=True) as card:
        copies: list[CopyRecord] = []
        card.copy_log.listen(copies.append)
        streams = {"compute": card.compute_stream, "h2d": card.h2d_stream, "d2h": card.d2h_stream}
        there, here = big(card, 10**6)
        events, causes = [], []
        waited: dict[str, list[int]] = {name: [] for name in streams}
        for what, where, size in steps:
            issued_s = clock.now()
            if what == "copy":
                direction = Direction.H2D if where in ("h2d", "small up") else Direction.D2H
                stream = streams.get(where, card.small_copy_stream)
                ends = (there, here) if direction is Direction.H2D else (here, there)
                events.append(stream.copy(ends[0][:size], ends[1][:size], direction=direction))
                causes.append((issued_s, list(waited.get(where, []))))
            elif what == "kernel":
                events.append(card.compute_stream.submit(lambda size=size: kernel(card, size)))
                causes.append((issued_s, list(waited["compute"])))
            elif what == "wait" and events:
                streams[where].wait(events[size % len(events)])
                waited[where].append(size % len(events))
            elif what == "host":
                assert clock.own is not None
                clock.own.advance(size * US)
            elif events:
                events[size % len(events)].wait()
            assert clock.now() >= issued_s
        card.synchronize()
        for event, (issued_s, after) in zip(events, causes, strict=True):
            assert issued_s - 1e-12 <= event.started_s <= event.ended_s <= clock.now()
            assert all(events[one].ended_s <= event.started_s + 1e-12 for one in after)
    for direction, rate in (("h2d", 1e9), ("d2h", 0.5e9)):
        mine = sorted((copy for copy in copies if copy.direction == direction), key=lambda copy: copy.started_s)
        for first, last in itertools.combinations_with_replacement(range(len(mine)), 2):
            some = [copy for copy in mine if mine[first].started_s <= copy.started_s]
            until_s = max(copy.ended_s for copy in mine[first : last + 1])
            carried = sum(copy.nbytes for copy in some if copy.ended_s <= until_s)
            assert carried <= (until_s - mine[first].started_s) * rate * (1 + 1e-9) + 1e-3


def test_results_are_those_of_the_other_emulated_card() -> None:
    def run(device: Device) -> torch.Tensor:
        with device:
            torch.manual_seed(0)
            weights, hidden = torch.randn(64, 64), torch.randn(4, 64)
            there = device.memory.allocate(weights.nbytes, MemoryCategory.EXPERTS).view(torch.float32).view(64, 64)
            out = torch.zeros(4, 64)
            for _ in range(3):
                device.compute_stream.wait(device.h2d_stream.copy(there, weights))
                done = device.compute_stream.submit(lambda: out.add_(hidden @ there))
                device.h2d_stream.wait(done)
                weights = weights * 1.5
            back = torch.empty_like(out)
            device.synchronize()
            device.small_copy_stream.copy(back, out, direction=Direction.D2H).wait()
            return back

    assert torch.equal(run(open_clocked(CARD)), run(open_emulated(CARD)))


def test_machines_with_such_cards_are_sound() -> None:
    profiles = timed_profiles()
    assert len(profiles) == 12
    assert {profile.link_h2d_gbps for profile in profiles} == {1, 2, 4, 8, 12, 16, 25, 32, 64}
    for profile in profiles:
        assert profile.has_clock
        spec = f"emulated:{profile.name}?host=fixed"
        assert emulated_cards(spec) == (profile.name, 1)
        assert has_fixed_host(spec)
    [device] = open_devices(f"emulated:{profiles[0].name}?host=fixed", 2**20)
    with device:
        assert clock.own is not None
        assert clock.own.is_fixed
        assert device.memory.total == 2**20
