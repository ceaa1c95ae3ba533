"""What only an emulated device can be asked: how it keeps time, and what it does when held up."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import CopyRecord, Device, Direction, Event
from engine.devices.emulated import open_emulated
from engine.devices.link import Link
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.hardware.profiles import DeviceProfile

GBPS = 0.5
LATENCY_US = 100.0
PATIENCE_S = 30.0


@pytest.fixture
def profile() -> DeviceProfile:
    return DeviceProfile("drip", "for tests", 2**26, GBPS, GBPS / 2, LATENCY_US)


@pytest.fixture
def glacial() -> DeviceProfile:
    return DeviceProfile("glacial", "for tests", 2**26, 0.001, 0.001, 0.0)


@pytest.fixture
def device(profile: DeviceProfile) -> Iterator[Device]:
    with open_emulated(profile) as device:
        yield device


def buffers(device: Device, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One on the device, one on the host."""
    return device.memory.allocate(nbytes, MemoryCategory.EXPERTS), torch.ones(nbytes, dtype=torch.uint8)


def least_s(nbytes: int, gbps: float = GBPS) -> float:
    return LATENCY_US / 1e6 + nbytes / (gbps * 1e9)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("nbytes", [1, 5000, 300_000, 3_000_000])
def test_a_copy_takes_as_long_as_the_link_needs(device: Device, nbytes: int) -> None:
    there, here = buffers(device, nbytes)
    up = device.h2d_stream.copy(there, here)
    down = device.d2h_stream.copy(here, there)
    for event, gbps in ((up, GBPS), (down, GBPS / 2)):
        event.wait()
        assert event.ended_s - event.started_s >= least_s(nbytes, gbps) * (1 - 1e-6)


def test_copies_of_one_direction_do_not_overlap_and_queued_ones_follow_each_other(device: Device) -> None:
    there, here = buffers(device, 200_000)
    events = [stream.copy(there, here) for _ in range(6) for stream in (device.h2d_stream, device.compute_stream)]
    for event in events:
        event.wait()
    spans = sorted((event.started_s, event.ended_s) for event in events)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def test_directions_are_independent(device: Device) -> None:
    there, here = buffers(device, 300_000)
    other, back = buffers(device, 300_000)
    gate = threading.Event()
    opened = device.compute_stream.submit(lambda: gate.wait(PATIENCE_S))
    device.h2d_stream.wait(opened)
    device.d2h_stream.wait(opened)
    up, down = device.h2d_stream.copy(there, here), device.d2h_stream.copy(back, other)
    gate.set()
    up.wait()
    down.wait()
    # Ready at the same moment, and neither was kept waiting by the other's link.
    assert opened.ended_s == up.started_s == down.started_s


class Onlooker:
    """Does something the first time that a copy on its link is waiting for the link's time to pass."""

    def __init__(self, gbps: float, look: Callable[[], object]) -> None:
        self.link = Link(gbps * 1e9, LATENCY_US / 1e6, self.interrupted)
        self.look = look
        self.looked = False

    def interrupted(self) -> bool:
        if not self.looked:
            self.looked = True
            self.look()
        return False


def test_a_small_copy_passes_a_big_one_which_ends_that_much_later() -> None:
    spans: list[tuple[float, float]] = []
    big, small = torch.zeros(3_000_000, dtype=torch.uint8), torch.zeros(100_000, dtype=torch.uint8)

    def pass_by() -> None:
        for _ in range(3):
            ready_s = time.perf_counter()
            spans.append(onlooker.link.carry(small.clone(), small, ready_s, is_urgent=True))

    onlooker = Onlooker(GBPS, pass_by)
    started_s, ended_s = onlooker.link.carry(big.clone(), big, time.perf_counter(), is_urgent=False)
    assert len(spans) == 3
    assert all(started_s <= start and start + least_s(100_000) <= end * (1 + 1e-9) for start, end in spans)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert ended_s - started_s >= (least_s(3_000_000) + 3 * least_s(100_000)) * (1 - 1e-6)
    # The next one finds the link taken until then.
    assert onlooker.link.carry(small.clone(), small, 0.0, is_urgent=True)[0] >= ended_s


def test_bytes_are_not_there_before_the_links_time_has_passed() -> None:
    there, here = torch.zeros(2**23, dtype=torch.uint8), torch.ones(2**23, dtype=torch.uint8)
    seen: list[bool] = []
    onlooker = Onlooker(GBPS, lambda: seen.append(bool(there.any())))
    onlooker.link.carry(there, here, time.perf_counter(), is_urgent=False)
    assert seen == [False]
    assert bool(there.all())


def test_streams_run_beside_each_other(device: Device) -> None:
    meet = threading.Barrier(len(device.streams), timeout=PATIENCE_S)
    for event in [stream.submit(meet.wait) for stream in device.streams]:
        event.wait()


def test_direction_is_told_by_who_owns_the_tensors(device: Device) -> None:
    told: list[CopyRecord] = []
    device.copy_log.listen(told.append)
    there, here = buffers(device, 64)
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
    with open_emulated(DeviceProfile("slow", "for tests", 2**20, 1.0, 1.0, 0.0, 3.0)) as device:
        busy: list[float] = []

        def compute() -> None:
            total = torch.zeros(1000)
            for _ in range(50):
                total.add_(1)
            busy.append(1)

        event = device.compute_stream.submit(compute)
        after = device.compute_stream.record()
        after.wait()
        assert busy
        assert after.ended_s >= event.ended_s > event.started_s


def test_the_budget_is_the_profiles_or_less(profile: DeviceProfile) -> None:
    with (
        open_emulated(profile) as whole,
        open_emulated(profile, 1, 1000) as part,
        open_emulated(profile, 2, 2**40) as big,
    ):
        assert [one.memory.total for one in (whole, part, big)] == [2**26, 1000, 2**26]
        assert [one.name for one in (whole, part, big)] == ["emulated:drip#0", "emulated:drip#1", "emulated:drip#2"]
        part.memory.allocate(1000, MemoryCategory.WEIGHTS)
        with pytest.raises(DeviceMemoryError):
            part.memory.allocate(1, MemoryCategory.WEIGHTS)


def test_events_from_any_thread_and_across_devices(profile: DeviceProfile, device: Device) -> None:
    with open_emulated(profile, 1) as other:
        gate = threading.Event()
        first = device.compute_stream.submit(lambda: gate.wait(PATIENCE_S))
        other.compute_stream.wait(first)
        second = other.compute_stream.submit(lambda: None)
        assert not first.wait(0.001)
        assert not second.done()
        waited: list[bool] = []
        threads = [in_thread(lambda: waited.append(second.wait(PATIENCE_S))) for _ in range(4)]
        gate.set()
        for thread in threads:
            thread.join()
        assert waited == [True] * 4
        assert second.started_s >= first.ended_s


def test_what_has_not_begun_can_be_cancelled(device: Device) -> None:
    gate, ran = threading.Event(), list[int]()
    running = device.compute_stream.submit(lambda: gate.wait(PATIENCE_S))
    unwanted = device.compute_stream.submit(lambda: ran.append(1))
    wanted = device.compute_stream.submit(lambda: ran.append(2))
    assert unwanted.cancel()
    assert not unwanted.cancel()
    with pytest.raises(EngineError, match="was cancelled"):
        unwanted.wait()
    gate.set()
    wanted.wait()
    assert not running.cancel()
    assert not wanted.cancel()
    assert ran == [2]
    device.synchronize()


def test_work_that_waits_for_later_work_of_its_stream_is_told_so(device: Device) -> None:
    later: list[Event] = []
    gate = threading.Event()

    def wait_for_later() -> None:
        gate.wait(PATIENCE_S)
        later[0].wait()

    event = device.compute_stream.submit(wait_for_later)
    later.append(device.compute_stream.record())
    gate.set()
    with pytest.raises(EngineError, match="queued behind it"):
        event.wait()
    device.recover()


def test_closing_tells_everyone_who_waits(glacial: DeviceProfile) -> None:
    device = open_emulated(glacial)
    there, here = buffers(device, 2**25)  # would take half a minute
    copy = device.h2d_stream.copy(there, here)
    device.compute_stream.wait(copy)
    behind = [device.compute_stream.submit(lambda: None) for _ in range(3)]
    small = device.small_copy_stream.record()
    device.d2h_stream.wait(behind[-1])
    last = device.d2h_stream.record()
    told: list[str] = []

    def wait() -> None:
        try:
            last.wait()
        except EngineError as error:
            told.append(error.message)

    threads = [in_thread(wait) for _ in range(3)]
    closers = [in_thread(device.close) for _ in range(3)]
    for thread in (*threads, *closers):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert len(told) == 3
    assert all(event.done() for event in (copy, *behind, small, last))
    assert last.failure is not None
    assert last.failure.code == ErrorCode.DEVICE_UNAVAILABLE


def test_closing_waits_for_work_that_waits_for_what_will_not_be_done(glacial: DeviceProfile) -> None:
    device = open_emulated(glacial)
    there, here = buffers(device, 2**25)
    copy = device.h2d_stream.copy(there, here)
    nested = device.compute_stream.submit(copy.wait)
    device.close()
    assert nested.done()


def test_a_device_that_waits_for_another_can_be_closed(profile: DeviceProfile, device: Device) -> None:
    gate = threading.Event()
    held = device.compute_stream.submit(lambda: gate.wait(PATIENCE_S))
    other = open_emulated(profile, 1)
    other.compute_stream.wait(held)
    end = other.compute_stream.record()
    other.close()
    assert end.failure is not None
    gate.set()
    held.wait()


def test_a_device_can_be_closed_from_its_own_thread(profile: DeviceProfile) -> None:
    device = open_emulated(profile)
    event = device.compute_stream.submit(device.close)
    event.wait(PATIENCE_S)
    device.close()


def test_a_forgotten_device_ends_its_threads(profile: DeviceProfile) -> None:
    open_emulated(profile)  # the leak check looks for them


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
    """Random copies, work, waits, failures, cancels and recoveries from several threads: nothing hangs or is lost."""
    ended: list[int] = []

    def hammer(seed: int) -> None:
        dice = random.Random(seed)
        there = device.memory.allocate(3000, MemoryCategory.STAGING)
        here = torch.full((3000,), seed, dtype=torch.uint8)
        events: list[Event] = []
        for _ in range(150):
            stream = dice.choice(device.streams)
            act = dice.randrange(8)
            if act < 3:
                events.append(stream.copy(there, here))
            elif act < 5:
                events.append(stream.submit(lambda: None))
            elif act == 5 and events:
                stream.wait(dice.choice(events))
            elif act == 6 and events:
                dice.choice(events).cancel()
            elif dice.random() < 0.2:
                stream.recover()
            elif dice.random() < 0.2:
                events.append(stream.submit(lambda: 1 // 0))
        for event in events:
            try:
                assert event.wait(PATIENCE_S)
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
