"""A graphics card through `torch.cuda`: NVIDIA's, and AMD's with a ROCm build of torch."""

from __future__ import annotations

import contextlib

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.cuda_stream import CudaClock, CudaStream, new_stream
from engine.devices.device import CopyLog, Device, Graph
from engine.devices.host_memory import aligned
from engine.devices.memory_budget import MemoryBudget
from engine.devices.pinned_memory import PinnedMemory


def capture_stream(place: torch.device) -> torch.cuda.Stream:
    """A stream for captures.

    Its cuBLAS workspace is allocated already: one allocated during a capture would stay in the graph's memory.
    """
    stream = new_stream(place)
    stream.wait_stream(torch.cuda.current_stream(place))
    with torch.cuda.stream(stream), contextlib.suppress(RuntimeError):  # cards without bf16
        square = torch.ones(16, 16, dtype=torch.bfloat16, device=place)
        torch.nn.functional.linear(square, square, square[0])
        torch.mm(square.float(), square.float())
    stream.synchronize()
    return stream


class CudaCapture:
    """See `engine.devices.device.Capture`.

    Captures use a stream of their own, as CUDA cannot capture the default stream, and memory from their own pool, which
    all segments share: they run one after the other.

    Args:
        stream: from `capture_stream`, the same for all captures of a card.
    """

    def __init__(self, place: torch.device, stream: torch.cuda.Stream) -> None:
        self._place = place
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._under_way: torch.cuda.CUDAGraph | None = None
        self._before: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """See `Capture.nbytes`."""
        segments = torch.cuda.memory_snapshot(self._pool, include_traces=False)  # type: ignore[no-untyped-call]
        return sum(int(segment["total_size"]) for segment in segments)

    def begin(self) -> None:
        """See `Capture.begin`."""
        self._before = torch.cuda.current_stream(self._place)
        self._stream.wait_stream(self._before)
        torch.cuda.set_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, which copy experts, must not be restricted by the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
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
        """See `Capture.abandon`."""
        graph, self._under_way = self._under_way, None
        if graph is None:
            return
        with contextlib.suppress(RuntimeError):  # CUDA reports the failed capture again
            graph.capture_end()
        self._resume()

    def close(self) -> None:
        """See `Capture.close`."""
        self.abandon()
        if self._graphs:
            torch.cuda.current_stream(self._place).synchronize()
        while self._graphs:
            self._graphs.pop().reset()

    def _resume(self) -> None:
        if self._before is not None:
            torch.cuda.set_stream(self._before)
            self._before = None


HEADROOM_BYTES = 2**30
"""Bytes left to the driver, torch's workspaces and the desktop."""


def cuda_count() -> int:
    """Number of cards that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def open_cuda(index: int = 0, vram_bytes: int | None = None) -> Device:
    """Opens a card.

    Args:
        vram_bytes: memory budget; None: all free memory except `HEADROOM_BYTES`.

    Raises:
        EngineError: `DEVICE_UNAVAILABLE` if there is no such card, or it does not respond.
    """
    count = cuda_count()
    if index >= count:
        what = f"no graphics card number {index}" if count else "no graphics card that torch can use"
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE, f"This machine has {what}: use cpu, or run `switchyard doctor`."
        )
    name = f"cuda:{index}"
    place = torch.device("cuda", index)
    try:
        free, _ = torch.cuda.mem_get_info(place)
        clock = CudaClock(place)
        # Weight copies may take long; activations need a stream of higher priority.
        queues = (
            torch.cuda.default_stream(place),
            new_stream(place),
            new_stream(place),
            new_stream(place, priority=-1),
        )
        to_capture = capture_stream(place)
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0]
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"Graphics card {name} does not respond ({text}): restart the computer or use --device cpu.",
        ) from error
    usable = max(0, free - HEADROOM_BYTES)
    log = CopyLog()
    roles = ("compute", "h2d", "d2h", "small copies")
    compute, h2d, d2h, small = (
        CudaStream(f"{name} {role}", queue, clock, log) for role, queue in zip(roles, queues, strict=True)
    )
    pinned = PinnedMemory(place)

    def allocate(nbytes: int) -> torch.Tensor:
        memory = aligned(nbytes, place)
        # torch may return memory that its current stream still uses, while other streams will write to it.
        torch.cuda.current_stream(place).synchronize()
        return memory

    def close() -> None:
        for stream in (compute, h2d, d2h, small):
            stream.close()
        pinned.close()

    return Device(
        name=name,
        torch_device=place,
        memory=MemoryBudget(name, usable if vram_bytes is None else min(usable, vram_bytes), allocate),
        host_memory=pinned,
        compute_stream=compute,
        h2d_stream=h2d,
        d2h_stream=d2h,
        small_copy_stream=small,
        copy_log=log,
        on_close=close,
        compute_follows_caller=True,
        new_capture=lambda: CudaCapture(place, to_capture),
    )
