"""A graphics card through `torch.cuda`: NVIDIA's, and AMD's with a ROCm build of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from engine.devices.card import CardKind
from engine.devices.device import Capture, Graph
from engine.devices.host_memory import PinnedMemory
from engine.hardware.dxgi import Adapter, card_adapter
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
    segments share: they run one after the other.  A pool that nobody holds gives its memory back to the card.

    Args:
        stream: from `capture_stream`, the same for all captures of a card.
    """

    def __init__(self, place: torch.device, stream: torch.cuda.Stream) -> None:
        self._place, self._stream = place, stream
        with torch.cuda.device(place):  # it belongs to the card that is current
            self._held: torch.cuda.MemPool | None = torch.cuda.MemPool()
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
        self._end(graph)
        graph.replay()
        self._graphs.append(graph)
        return graph

    def abandon(self) -> None:
        graph, self._under_way = self._under_way, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # CUDA reports the failed capture again
                self._end(graph)

    def close(self) -> None:
        self.abandon()
        if self._graphs:
            torch.cuda.current_stream(self._place).synchronize()
        while self._graphs:
            self._graphs.pop().reset()
        self._held = None

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            try:
                graph.pool()
            except RuntimeError:  # it failed before torch's allocator has left the pool; else the graph does so itself
                for leave in ("_cuda_endAllocateToPool", "_cuda_releasePool"):  # as `use_mem_pool` does at its end
                    with contextlib.suppress(RuntimeError, AttributeError):  # it has left already
                        getattr(torch._C, leave)(self._place.index or 0, self._pool)
            raise
        finally:
            self._resume()

    def _resume(self) -> None:
        if self._before is not None:
            torch.cuda.set_stream(self._before)
            torch.cuda.set_device(self._card)  # a stream brings its card with it
            self._before = None


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
    stream = capture_stream(place)
    return lambda: CudaCapture(place, stream)


def _adapter(index: int) -> Adapter | None:
    return card_adapter(index, lambda: torch.cuda.get_device_name(index))


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
