"""The emulated card: what it does, and when, by its clock."""

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

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
from engine.devices.memory_budget import MemoryCategory
from engine.devices.opening import open_devices
from engine.devices.timeline import Timeline
from engine.hardware.profiles import DeviceProfile, emulated_cards, has_fixed_host, timed_profiles
from tests.device_contract import DeviceContract
from tests.refusals import refused

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
    device.meter.kernel(nbytes, flops)


def test_the_system_s_clock_is_back_once_the_card_is_closed() -> None:
    before = clock.now
    with open_emulated(CARD), open_emulated(CARD, 1):
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


def test_a_layer_by_hand(card: Device) -> None:
    """Two hits beside an expert that is fetched, and one on the processor meanwhile."""
    there, here = big(card, MIB)
    meter = card.meter
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
    begun_s = clock.now()
    with meter.on_card():
        meter.kernel(100e3, 0)
        with meter.on_host(), meter.on_processor(2e3, 0):
            pass
        meter.kernel(100e3, 0)
    # The second kernel is issued when the processor has done its part, while the first one runs.
    assert clock.now() - begun_s == about(2 * (5 * US + 1 * US))


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
        assert clock.own.is_fixed
        assert device.memory.total == 2**20


@pytest.fixture
def device() -> Iterator[Device]:
    """Without a data sheet."""
    with open_emulated(DRIP) as device:
        yield device


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


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


def test_work_that_waits_for_later_work_of_its_stream_is_told_so(device: Device) -> None:
    later: list[Event] = []
    event = device.compute_stream.submit(lambda: later[0].wait())
    later.append(device.compute_stream.record())
    with pytest.raises(EngineError, match="queued behind it"):
        event.wait()
    device.recover()


def test_closing_tells_everyone_who_waits(device: Device) -> None:
    behind = [stream.submit(lambda: None) for stream in device.streams for _ in range(2)]
    for closer in [in_thread(device.close) for _ in range(3)]:
        closer.join(PATIENCE_S)
        assert not closer.is_alive()
    for event in behind:
        assert event.done()
        with refused(ErrorCode.DEVICE_UNAVAILABLE, match="was closed"):
            event.wait()


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
