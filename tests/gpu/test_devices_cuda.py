"""The common contract on a real card, and what only a card can be asked."""

import time
from collections.abc import Iterator

import pytest
import torch

from engine.common.errors import ErrorCode
from engine.devices import card
from engine.devices.card import open_card
from engine.devices.cuda import CUDA
from engine.devices.device import Device
from engine.devices.host_memory import PinnedMemory, measure_pinnable, register, unregister
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.devices.opening import open_devices
from tests.device_contract import DeviceContract
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MB = 2**20


@pytest.fixture
def device() -> Iterator[Device]:
    with open_card(CUDA, vram_bytes=512 * MB) as device:
        yield device


class TestCuda(DeviceContract):
    pass


def test_the_budget_is_enforced_below_what_the_card_has(device: Device) -> None:
    assert device.memory.total == 512 * MB
    with pytest.raises(DeviceMemoryError):
        device.memory.allocate(512 * MB + 1, MemoryCategory.EXPERTS)


def test_a_refusal_of_the_card_is_one_of_the_budget() -> None:
    with open_card(CUDA) as device:
        device.memory.limit(2**50)
        with pytest.raises(DeviceMemoryError, match="refused"):
            device.memory.allocate(2**45, MemoryCategory.EXPERTS)
        assert device.memory.use().used == 0
        device.memory.release(device.memory.allocate(MB, MemoryCategory.EXPERTS))


def test_a_card_that_is_not_there() -> None:
    with refused(ErrorCode.DEVICE_UNAVAILABLE, match="no graphics card number 99"):
        open_devices("cuda:99")


def test_cuda_names_every_card() -> None:
    devices = open_devices("cuda", 64 * MB)
    try:
        assert [device.name for device in devices] == [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    finally:
        for device in devices:
            device.close()


def test_pinned_copies_return_at_once_and_arrive(device: Device) -> None:
    here = device.host_memory.allocate(256 * MB, unit=MB)
    assert device.host_memory.pinned_bytes == 256 * MB
    assert here.is_pinned()
    here.fill_(7)
    there = device.memory.allocate(256 * MB, MemoryCategory.EXPERTS)
    event = device.h2d_stream.copy(there, here)
    assert not event.done()  # 256 MB take milliseconds on any link
    event.wait()
    assert int(there[-1]) == 7
    device.host_memory.release(here)
    assert device.host_memory.pinned_bytes == 0


def test_copies_within_each_unit_of_memory_pinned_in_chunks(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.devices.host_memory.CHUNK_BYTES", 4 * MB)
    here = device.host_memory.allocate(30 * MB, unit=3 * MB)
    here.copy_(torch.arange(30 * MB, dtype=torch.int64).to(torch.uint8))
    there = device.memory.allocate(30 * MB, MemoryCategory.EXPERTS)
    for unit in range(10):
        part = slice(unit * 3 * MB, (unit + 1) * 3 * MB)
        device.h2d_stream.copy(there[part], here[part])
    device.h2d_stream.synchronize()
    assert torch.equal(there.cpu(), here)
    device.host_memory.release(here)


def test_a_refused_pinning_poisons_nothing(device: Device) -> None:
    place = device.torch_device
    assert not register(4096, 4096, place)  # nobody's memory
    assert int(torch.ones(10, device=place).sum()) == 10
    memory = PinnedMemory(place, limit=8 * MB)
    big = memory.allocate(64 * MB, unit=64 * MB)  # beyond the limit: not pinned, but there
    assert memory.pinned_bytes == 0
    small = memory.allocate(4 * MB)
    assert memory.pinned_bytes == 4 * MB
    assert small.is_pinned()
    assert not big.is_pinned()
    memory.close()
    assert memory.pinned_bytes == 0


def test_registering_twice_is_refused_and_harmless(device: Device) -> None:
    memory = device.host_memory.allocate(MB)
    assert not register(memory.data_ptr(), MB, device.torch_device)
    device.host_memory.release(memory)
    unregister(memory.data_ptr(), device.torch_device)
    assert int(torch.ones(10, device=device.torch_device).sum()) == 10


def test_pinning_is_measured_in_a_child() -> None:
    assert 0 < measure_pinnable(512 * MB) <= 512 * MB


def test_spans_stay_on_the_hosts_clock_when_the_anchor_is_renewed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "_ANCHOR_AGE_S", 0.0)
    for _ in range(20):
        before = time.perf_counter()
        event = device.compute_stream.submit(lambda: torch.ones(1000, device=device.torch_device).sum())
        event.wait()
        after = time.perf_counter()
        assert before - 1e-3 <= event.started_s <= event.ended_s <= after + 1e-3
