"""A graphics card through `torch.cuda`: NVIDIA's, and AMD's with a ROCm build of torch."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Callable

import torch

from engine.devices.card import CardKind
from engine.devices.device import Capture, Graph
from engine.devices.host_memory import PinnedMemory
from engine.hardware.dxgi import Adapter, adapter_of
from engine.hardware.gpu_info import HIDING, GpuInfo
from engine.hardware.nvml import Nvml, nvidia_gpus


def capture_stream(place: torch.device) -> torch.cuda.Stream:
    """A stream for captures.

    Its cuBLAS workspace is allocated already: one allocated during a capture would stay in the graph's memory.
    """
    stream = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(place))
    with torch.cuda.stream(stream), contextlib.suppress(RuntimeError):  # cards without bf16
        square = torch.ones(16, 16, dtype=torch.bfloat16, device=place)
        torch.nn.functional.linear(square, square, square[0])
        torch.mm(square.float(), square.float())
    stream.synchronize()
    return stream


class CudaCapture:
    """See `engine.devices.device.Capture`.

    Captures use a stream of their own, as CUDA cannot capture the default stream, and memory from a pool, which all
    segments share: they run one after the other.

    Args:
        stream: from `capture_stream`, the same for all captures of a card.
        pools: of the card; this capture takes one, and returns it for the next.
    """

    def __init__(self, place: torch.device, stream: torch.cuda.Stream, pools: CapturePools) -> None:
        self._place = place
        self._stream = stream
        self._pools = pools
        self._held = pools.take()
        self._pool = self._held.id
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._under_way: torch.cuda.CUDAGraph | None = None
        self._before: torch.cuda.Stream | None = None
        self._card = 0

    @property
    def nbytes(self) -> int:
        segments = torch.cuda.memory_snapshot(self._pool, include_traces=False)  # type: ignore[no-untyped-call]
        return sum(int(segment["total_size"]) for segment in segments)

    def begin(self) -> None:
        self._before, self._card = torch.cuda.current_stream(self._place), torch.cuda.current_device()
        self._stream.wait_stream(self._before)
        torch.cuda.set_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, which copy experts, must not be restricted by the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        except BaseException:
            self._resume()
            raise
        self._under_way = graph

    def end(self) -> Graph:
        """See `Capture.end`.  CUDA does not run what it captures, so it is run here."""
        graph, self._under_way = self._under_way, None
        assert graph is not None
        try:
            graph.capture_end()
        finally:
            self._resume()
        graph.replay()
        self._graphs.append(graph)
        return graph

    def abandon(self) -> None:
        graph, self._under_way = self._under_way, None
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError:  # CUDA reports the failed capture again, before the allocator has left the pool
            end_allocating(self._place, self._pool)
        self._resume()

    def close(self) -> None:
        self.abandon()
        if self._graphs:
            torch.cuda.current_stream(self._place).synchronize()
        while self._graphs:
            self._graphs.pop().reset()
        self._pools.give_back(self._held)

    def _resume(self) -> None:
        if self._before is not None:
            torch.cuda.set_stream(self._before)
            torch.cuda.set_device(self._card)  # a stream brings its card with it
            self._before = None


class CapturePools:
    """Memory pools of one card for captures.  One that ended leaves its pool, and what that holds, to the next.

    With a pool each, memory of the card would be lost to the program with every capture: torch gives back a dead pool's
    only when it runs short.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._free: list[torch.cuda.MemPool] = []

    def take(self) -> torch.cuda.MemPool:
        """One that no capture uses."""
        if self._free:
            return self._free.pop()
        with torch.cuda.device(self._place):  # it belongs to the card that is current
            return torch.cuda.MemPool()

    def give_back(self, pool: torch.cuda.MemPool) -> None:
        """Ends its use.  Idempotent."""
        if not any(pool is free for free in self._free):
            self._free.append(pool)


def end_allocating(place: torch.device, pool: tuple[int, int]) -> None:
    """Lets torch's allocator leave a pool after a failed capture; else all later memory would come from there.

    `CUDAGraph.capture_end` raises before it has done so.  This is what `torch.cuda.use_mem_pool` does at its end.
    """
    index = place.index or 0
    for leave in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with contextlib.suppress(RuntimeError, AttributeError):  # it has left already
            getattr(torch._C, leave)(index, pool)


def _nvidia(index: int) -> GpuInfo | None:
    """What NVIDIA's driver says of the card that torch counts so."""
    properties = torch.cuda.get_device_properties(index)
    numbers = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    address = "{:08x}:{:02x}:{:02x}.0".format(*numbers) if min(numbers) >= 0 else ""
    return next((card for card in nvidia_gpus(Nvml())[0] if _is_at(card.bus, address)), None)


def identity_of(index: int) -> str:
    """What times depend on: the card, its memory, its driver and its link, as far as they are known."""
    properties = torch.cuda.get_device_properties(index)
    found = _nvidia(index)
    words = [properties.name, f"{properties.total_memory >> 20} MiB"]
    if found is not None:
        words += [f"driver {found.driver}", f"PCIe {found.pcie_generation} x{found.pcie_width_now or found.pcie_width}"]
    return " ".join((*words, f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"HIP {torch.version.hip}"))


def _is_at(bus: str | None, address: str) -> bool:
    """Whether two PCI addresses are the same; the domain has four or eight digits."""
    return bool(bus and address) and str(bus).lower().zfill(16)[-12:] == address[-12:]


def _captures(place: torch.device) -> Callable[[], Capture]:
    stream, pools = capture_stream(place), CapturePools(place)
    return lambda: CudaCapture(place, stream, pools)


def _luid(index: int) -> bytes | None:
    """What Windows calls a card of NVIDIA's until it is restarted."""
    try:
        driver = ctypes.CDLL("nvcuda.dll")
        card, luid, mask = ctypes.c_int(), (ctypes.c_uint8 * 8)(), ctypes.c_uint()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(card), index):
            return None
        return None if driver.cuDeviceGetLuid(luid, ctypes.byref(mask), card) else bytes(luid)
    except (OSError, AttributeError):  # AMD's, or an old driver
        return None


def _adapter(index: int) -> Adapter | None:
    """The card as Windows knows it; None elsewhere."""
    if platform.system() != "Windows":
        return None
    return adapter_of(_luid(index), torch.cuda.get_device_name(index))


def shows_desktop(index: int) -> bool | None:
    """Whether a card drives a display; None if no driver says so."""
    adapter = _adapter(index)
    if adapter is not None:
        adapter.close()
        return adapter.shows_desktop
    found = _nvidia(index)
    return None if found is None else found.shows_desktop


def counts_in_ram(index: int) -> Callable[[], int | None] | None:
    """See `CardKind.in_ram`: Windows says it, and by how much the card has more than the system wants it to have."""
    adapter = _adapter(index)
    if adapter is None:
        return None

    def count() -> int | None:
        memory = adapter.memory()
        return None if memory is None else memory.in_ram + max(0, memory.used - memory.budget)

    return count


CUDA = CardKind(
    "cuda",
    torch.cuda,
    PinnedMemory,
    identity_of,
    _captures,
    shows_desktop,
    counts_in_ram,
    torch.backends.cuda.is_built,
    HIDING,
)
