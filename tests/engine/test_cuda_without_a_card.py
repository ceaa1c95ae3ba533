"""What a real card's device does around torch, with torch's own calls replaced: no card is needed."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from engine.devices import cuda
from engine.devices.card import HEADROOM_BYTES, hard_fraction
from engine.devices.cuda import CudaCapture, identity_of
from engine.hardware.gpu_info import GpuInfo

PLACE = torch.device("cuda", 1)


class _Pool:
    """One of torch's memory pools; which numbers the living have."""

    alive: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.id = (max(_Pool.alive, default=0) + 1, 0)
        _Pool.alive.append(self.id[0])

    def __del__(self) -> None:
        _Pool.alive.remove(self.id[0])


class _Graph:
    """A graph whose capture fails if told to, or what comes after it."""

    fails = is_made = False

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self._pool = pool

    def capture_end(self) -> None:
        if _Graph.fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def pool(self) -> tuple[int, int]:
        if not _Graph.is_made:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class _Stream:
    def wait_stream(self, _other: object) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, Any]]:
    """Calls by which torch's allocator leaves a pool."""
    calls: list[tuple[str, int, Any]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda index, pool, name=name: calls.append((name, index, pool)), raising=False
        )
    monkeypatch.setattr(torch.cuda, "MemPool", _Pool)
    monkeypatch.setattr(torch.cuda, "device", lambda _place: _Nothing())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _place=None: _Stream())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _stream: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _index: None)
    monkeypatch.setattr(_Graph, "fails", False)
    return calls


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("is_made", [False, True])
def test_after_a_failed_capture_memory_no_longer_comes_from_its_pool(
    left: list[tuple[str, int, Any]], monkeypatch: pytest.MonkeyPatch, ends: bool, is_made: bool
) -> None:
    capture = CudaCapture(PLACE, _Stream())  # type: ignore[arg-type]
    capture.begin()
    monkeypatch.setattr(_Graph, "fails", True)
    monkeypatch.setattr(_Graph, "is_made", is_made)  # such a graph leaves the pool by itself
    with pytest.raises(RuntimeError, match="previous error") if ends else nullcontext():
        capture.end() if ends else capture.abandon()
    assert left == [(f"_cuda_{name}", 1, (1, 0)) for name in ("endAllocateToPool", "releasePool") if not is_made]
    capture.close()
    assert len(left) <= 2
    assert not _Pool.alive


def test_memory_beyond_the_plan_is_refused_by_torch_itself() -> None:
    total = 24 * 2**30
    assert hard_fraction(20 * 2**30, total) == pytest.approx((20 * 2**30 + HEADROOM_BYTES / 2) / total)
    assert hard_fraction(total, total) == 1.0


CARD = GpuInfo("RTX 4090", 24 * 2**30, None, "580.65", "8.9", 4, 16, pcie_width_now=8, bus="00000000:41:00.0")


@pytest.mark.parametrize(
    ("bus", "driver", "expected"),
    [
        ("00000000:41:00.0", "580.65", "RTX 4090 24564 MiB driver 580.65 PCIe 4 x8 CUDA 13.0"),
        ("0000:41:00.0", "590.1", "RTX 4090 24564 MiB driver 590.1 PCIe 4 x8 CUDA 13.0"),
        ("0000:01:00.0", "580.65", "RTX 4090 24564 MiB CUDA 13.0"),
        (None, "580.65", "RTX 4090 24564 MiB CUDA 13.0"),
    ],
)
def test_what_is_measured_is_kept_for_this_card_driver_and_link(
    monkeypatch: pytest.MonkeyPatch, bus: str | None, driver: str, expected: str
) -> None:
    properties = SimpleNamespace(
        name="RTX 4090", total_memory=24564 * 2**20, pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(cuda, "nvidia_gpus", lambda _nvml: ((replace(CARD, bus=bus, driver=driver),), ""))
    assert identity_of(1) == expected


def test_a_capture_that_has_ended_gives_its_pool_back(left: list[tuple[str, int, Any]]) -> None:
    pair = [CudaCapture(PLACE, _Stream()) for _ in range(2)]  # type: ignore[arg-type]
    for capture in pair:
        capture.begin()
        capture.end()
    assert len(set(_Pool.alive)) == 2
    for capture in pair:
        capture.close()
        capture.close()
    assert not _Pool.alive


def test_a_capture_that_was_given_up_in_good_order_leaves_the_pool_to_torch(left: list[tuple[str, int, Any]]) -> None:
    capture = CudaCapture(PLACE, _Stream())  # type: ignore[arg-type]
    capture.begin()
    capture.abandon()
    assert left == []
