"""CUDA's graphs behind the common interface."""

from __future__ import annotations

import contextlib

import torch

from engine.devices.cuda_clock import new_stream
from engine.devices.graphs import Graph


def capture_stream(place: torch.device) -> torch.cuda.Stream:
    """A stream to capture on.

    cuBLAS has got its workspace for it: what it allocates in a capture would stay for ever, in memory of the graph's.
    """
    stream = new_stream(place)
    stream.wait_stream(torch.cuda.current_stream(place))
    with torch.cuda.stream(stream), contextlib.suppress(RuntimeError):  # cards that do not know bf16
        square = torch.ones(16, 16, dtype=torch.bfloat16, device=place)
        torch.nn.functional.linear(square, square, square[0])
        torch.mm(square.float(), square.float())
    stream.synchronize()
    return stream


class CudaCapture:
    """See `engine.devices.graphs.Capture`.

    Capturing takes a stream of its own, for CUDA captures no default stream, and memory from a pool of its own, which
    all pieces share: they run one after the other.

    Args:
        stream: of `capture_stream`, the same for all captures of a card.
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
            # Threads that copy experts meanwhile may do what a capture would forbid them.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._resume()
            raise
        self._under_way = graph

    def end(self) -> Graph:
        """See `Capture.end`.  CUDA does not run what it captures: it is done now."""
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
        with contextlib.suppress(RuntimeError):  # CUDA says once more that the capture has failed
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
