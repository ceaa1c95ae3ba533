"""CUDA graphs behind the common interface."""

from __future__ import annotations

import contextlib

import torch

from engine.devices.cuda_clock import new_stream
from engine.devices.graphs import Graph


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
    """See `engine.devices.graphs.Capture`.

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
