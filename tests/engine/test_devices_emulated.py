"""The emulated card: what it does, and when, by its clock."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.common import clock
from engine.common.clock import OwnClock
from engine.common.errors import EngineError, ErrorCode
from engine.devices.cpu import open_cpu
from engine.devices.device import CopyRecord, Device, Direction, Event
from engine.devices.emulated import open_emulated
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.devices.opening import open_devices
from engine.devices.timeline import Timeline
from engine.hardware.profiles import DeviceProfile, emulated_cards, has_fixed_host, timed_profiles
from tests.device_contract import DeviceContract, fail

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
DRIP = DeviceProfile("drip", "for tests", 2**26, 0.5, 0.25, 100.0)
"""Without a data sheet."""
PATIENCE_S = 30.0


class TestClocked(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with open_emulated(replace(CARD, call_us=2.0)) as device:
            yield device


class TestClockedFixedHost(DeviceContract):
    @pytest.fixture
    def device(self) -> Iterator[Device]:
        with open_emulated(CARD, is_fixed=True) as device:
            yield device


@pytest.fixture
def card() -> Iterator[Device]:
    with open_emulated(CARD, is_fixed=True) as device:
        yield device


def big(device: Device, nbytes: int, **how: Direction) -> tuple[torch.Tensor, torch.Tensor]:
    return device.memory.allocate(nbytes, MemoryCategory.STAGING), torch.zeros(nbytes, dtype=torch.uint8)


def kernel(device: Device, nbytes: float, flops: float = 0.0) -> None:
    assert device.meter is not None
    device.meter.kernel(nbytes, flops)


def test_the_system_s_clock_is_back_once_the_card_is_closed() -> None:
    before = clock.now
    with open_emulated(CARD), open_emulated(CARD, 1):
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
    with open_emulated(replace(CARD, call_us=1.0), is_fixed=True) as card:
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


def test_results_are_those_of_a_card_without_a_data_sheet() -> None:
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

    assert torch.equal(run(open_emulated(CARD)), run(open_emulated(replace(CARD, card_gbps=0.0))))


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


@pytest.fixture
def device() -> Iterator[Device]:
    """Without a data sheet."""
    with open_emulated(DRIP) as device:
        yield device


@pytest.fixture
def glacial() -> DeviceProfile:
    return DeviceProfile("glacial", "for tests", 2**26, 0.001, 0.001, 0.0)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_copies_of_one_direction_do_not_overlap_and_queued_ones_follow_each_other(device: Device) -> None:
    there, here = big(device, 200_000)
    events = [stream.copy(there, here) for _ in range(6) for stream in (device.h2d_stream, device.compute_stream)]
    device.synchronize()
    spans = sorted((event.started_s, event.ended_s) for event in events)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


@pytest.mark.parametrize("asks", [False, True])
def test_bytes_are_there_when_the_copy_has_ended_and_not_before(device: Device, *, asks: bool) -> None:
    there, here = big(device, 100_000)
    there.fill_(1)
    event = device.h2d_stream.copy(there, here)
    assert not event.wait(1e-5)
    assert (event.done(), bool(there.all())) == (False, True)
    assert clock.own is not None
    if asks:
        event.wait()
    else:
        clock.own.advance(1.0)
        assert event.done()
    assert not there.any()


def test_work_is_done_when_somebody_asks_for_what_needs_it(device: Device) -> None:
    ran = list[int]()
    device.compute_stream.submit(lambda: ran.append(1))
    device.h2d_stream.submit(lambda: ran.append(2))
    third = device.compute_stream.submit(lambda: ran.append(3))
    device.d2h_stream.wait(third)
    assert ran == []
    device.d2h_stream.synchronize()
    assert ran == [1, 3]
    device.synchronize()
    assert ran == [1, 3, 2]


def test_waiting_with_a_limit_waits_for_what_another_thread_does(device: Device) -> None:
    has_begun, goes_on = threading.Event(), threading.Event()
    event = device.compute_stream.submit(lambda: (has_begun.set(), goes_on.wait(30)))
    other = in_thread(event.wait)
    assert has_begun.wait(30)
    later = threading.Timer(0.05, goes_on.set)
    later.start()
    assert event.wait(timeout_s=1e6)
    other.join()
    later.join()


PROGRAM = st.lists(
    st.tuples(st.sampled_from(["write", "read", "copy", "look"]), st.integers(0, 3), st.integers(0, 3)), max_size=25
)


@given(PROGRAM, st.randoms(use_true_random=False))
def test_what_waits_as_it_should_is_right_in_any_order(
    program: list[tuple[str, int, int]], draw: random.Random
) -> None:
    """Four places, each used by any stream after its last use: results are those of a device that works at once."""

    def run(device: Device) -> list[float]:
        with device:
            places = [device.memory.allocate(4096, MemoryCategory.STAGING).view(torch.float32) for _ in range(4)]
            last, seen = [stream.record() for stream in device.streams], list[torch.Tensor]()
            for number, place in enumerate(places):
                place.fill_(number)
            for step, (what, first, second) in enumerate(program):
                stream = device.streams[step * 7 % 4]
                one, other = places[first], places[second]
                stream.wait(last[first])
                stream.wait(last[second])
                if what == "write":
                    event = stream.submit(lambda one=one, step=step: one.add_(step))
                elif what == "read":
                    event = stream.submit(lambda one=one, other=other: one.copy_(one * 0.5 + other))
                else:
                    target = torch.empty_like(one) if what == "look" else other
                    seen += [target] if what == "look" else []
                    event = stream.copy(target, one)
                last[first] = last[second] = event
            device.synchronize()
            return [float(tensor.sum()) for tensor in (*places, *seen)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timeline, "hurries", lambda _timeline: draw.random() < 0.5)
        assert run(open_emulated(DRIP)) == run(open_cpu(2**26))


@pytest.mark.parametrize("race", ["read before it has come", "overwritten while it is read"])
def test_a_race_is_found(race: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some order something else comes out."""
    found, draw = set[float](), random.Random(1)
    monkeypatch.setattr(Timeline, "hurries", lambda _timeline: draw.random() < 0.5)
    for _ in range(20):
        with open_emulated(DRIP) as device:
            there, here = big(device, 1000)
            there.fill_(1)
            out = torch.zeros(1)
            if race == "read before it has come":
                device.h2d_stream.copy(there, here)
                device.compute_stream.submit(lambda out=out, there=there: out.add_(there.sum()))
            else:
                device.compute_stream.submit(lambda out=out, there=there: out.add_(there.sum()))
                device.h2d_stream.copy(there, here).wait()
            device.synchronize()
            found.add(float(out))
    assert found == {0.0, 1000.0}


def test_direction_is_told_by_who_owns_the_tensors(device: Device) -> None:
    told: list[CopyRecord] = []
    device.copy_log.listen(told.append)
    there, here = big(device, 64)
    torchs = torch.zeros(64, dtype=torch.uint8)
    small, compute = device.small_copy_stream, device.compute_stream
    for copy in (
        lambda: small.copy(there[:8], here[:8]),
        lambda: small.copy(here, there),
        lambda: small.copy(torchs, here),
        lambda: small.copy(torchs, here, direction=Direction.D2H),
        lambda: compute.copy(torchs, here),
        lambda: compute.copy(there, there.clone()),
    ):
        copy().wait()
    assert [one.direction for one in told] == ["h2d", "d2h", "h2d", "d2h", "d2d", "h2d"]


def test_a_slower_card_takes_longer() -> None:
    with open_emulated(replace(DRIP, compute_slowdown=1000.0)) as device:
        event = device.compute_stream.submit(lambda: torch.zeros(1000).add_(1))
        begun_s = perf_counter()
        event.wait()
        assert event.ended_s - event.started_s > perf_counter() - begun_s


def test_the_budget_is_the_profiles_or_less() -> None:
    with (
        open_emulated(DRIP) as whole,
        open_emulated(DRIP, 1, 1000) as part,
        open_emulated(DRIP, 2, 2**40) as big,
    ):
        assert [one.memory.total for one in (whole, part, big)] == [2**26, 1000, 2**26]
        assert [one.name for one in (whole, part, big)] == ["emulated:drip#0", "emulated:drip#1", "emulated:drip#2"]
        part.memory.allocate(1000, MemoryCategory.WEIGHTS)
        with pytest.raises(DeviceMemoryError):
            part.memory.allocate(1, MemoryCategory.WEIGHTS)


def test_events_from_any_thread_and_across_devices(device: Device) -> None:
    with open_emulated(DRIP, 1) as other:
        there, here = big(device, 1000)
        first = device.h2d_stream.copy(there, here)
        other.compute_stream.wait(first)
        second = other.compute_stream.submit(lambda: None)
        assert not first.wait(1e-6)
        assert not second.done()
        waited: list[bool] = []
        for thread in [in_thread(lambda: waited.append(second.wait())) for _ in range(4)]:
            thread.join()
        assert waited == [True] * 4
        assert second.started_s >= first.ended_s


def test_work_that_waits_for_later_work_of_its_stream_is_told_so(device: Device) -> None:
    later: list[Event] = []
    event = device.compute_stream.submit(lambda: later[0].wait())
    later.append(device.compute_stream.record())
    with pytest.raises(EngineError, match="queued behind it"):
        event.wait()
    device.recover()


def test_what_a_thread_is_doing_is_waited_for_by_others(device: Device) -> None:
    begun, gate = threading.Event(), threading.Event()
    event = device.compute_stream.submit(lambda: (begun.set(), gate.wait(PATIENCE_S)))
    behind = device.compute_stream.record()
    waiting = [in_thread(event.wait)]
    assert begun.wait(PATIENCE_S)
    waiting += [in_thread(device.close)]
    gate.set()
    for thread in waiting:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert event.failure is None
    assert behind.failure is not None


def test_closing_tells_everyone_who_waits(device: Device) -> None:
    behind = [stream.submit(lambda: None) for stream in device.streams for _ in range(2)]
    for closer in [in_thread(device.close) for _ in range(3)]:
        closer.join(PATIENCE_S)
        assert not closer.is_alive()
    for event in behind:
        assert event.done()
        with pytest.raises(EngineError, match="was closed") as caught:
            event.wait()
        assert caught.value.code == ErrorCode.DEVICE_UNAVAILABLE


def test_a_device_that_waits_for_another_can_be_closed(device: Device) -> None:
    held = device.compute_stream.submit(fail)
    other = open_emulated(DRIP, 1)
    other.compute_stream.wait(held)
    end = other.compute_stream.record()
    other.close()
    assert end.failure is not None
    assert held.failure is None
    device.close()


def test_a_device_can_be_closed_by_its_own_work() -> None:
    device = open_emulated(DRIP)
    event = device.compute_stream.submit(device.close)
    behind = device.compute_stream.record()
    event.wait()
    with pytest.raises(EngineError, match="was closed"):
        behind.wait()


def test_a_forgotten_device_leaves_its_clock() -> None:
    open_emulated(DRIP)
    gc.collect()
    assert clock.own is None


def test_a_stream_keeps_no_tensor_of_work_that_has_ended(device: Device) -> None:
    gone = threading.Event()

    class Tracked:
        def __del__(self) -> None:
            gone.set()

    def submit() -> None:
        tracked = Tracked()

        def work() -> None:
            local = tracked
            raise ZeroDivisionError(f"with {type(local).__name__} in a frame")

        with pytest.raises(EngineError):
            device.compute_stream.submit(work).wait()

    submit()
    assert gone.wait(PATIENCE_S)
    device.recover()


def test_many_threads_many_streams(device: Device) -> None:
    """Random copies, work, waits, failures and recoveries from several threads: nothing hangs or is lost."""
    ended: list[int] = []

    def hammer(seed: int) -> None:
        dice = random.Random(seed)
        there = device.memory.allocate(3000, MemoryCategory.STAGING)
        here = torch.full((3000,), seed, dtype=torch.uint8)
        events: list[Event] = []
        for _ in range(150):
            stream = dice.choice(device.streams)
            act = dice.randrange(7)
            if act < 3:
                events.append(stream.copy(there, here))
            elif act < 5:
                events.append(stream.submit(lambda: None))
            elif act == 5 and events:
                stream.wait(dice.choice(events))
            elif dice.random() < 0.2:
                stream.recover()
            elif dice.random() < 0.2:
                events.append(stream.submit(lambda: 1 // 0))
        for event in events:
            try:
                assert event.wait()
            except EngineError:
                assert event.failure is not None
            assert event.started_s <= event.ended_s
        ended.append(seed)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(ended) == [0, 1, 2, 3]
    device.recover()
    device.synchronize()
    assert device.memory.use().by_category[MemoryCategory.STAGING] == 4 * 3000
