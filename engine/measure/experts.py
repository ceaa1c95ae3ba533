"""Expert times with the kernels that models use, on weights that are in no cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine.devices.memory_budget import MemoryCategory
from engine.experts.dispatch import StandardExperts
from engine.experts.record import allocate_records
from engine.formats import tiled_format
from engine.formats.layouts import RecordLayout
from engine.formats.tiles import Pairing
from engine.hardware.measured import ExpertTime
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.native.library import NativeKernels, load_kernels
from engine.measure.arithmetic import seconds_here, seconds_on, torch_threads
from engine.measure.run import NotMeasuredError, Run, counted

_AT_ONCE = 8
"""Experts per call: about as many as most models route a token to."""
_MOST_EXPERTS = 2048
_FEWEST = 2
"""Experts in memory at least, so that none is read again while still cached."""
NARROWEST = 256
"""Smallest inner width that still stands for the expert."""
_TILE = 32
"""Widths are multiples of this in quantised records."""
_DEVICE_BYTES = 2**29
"""Bytes of weights on a device: more than its caches hold."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Widths of an expert with a gate."""

    hidden: int
    inner: int


@dataclass(frozen=True)
class CpuExperts:
    """On the CPU: every token count with all threads, and one token with every thread count."""

    shapes: tuple[ExpertShape, ...]
    precisions: tuple[str, ...]
    tokens: tuple[int, ...]
    threads_of: Callable[[int], tuple[int, ...]]
    repeats: int
    estimated_s: float
    name: str = "experts on the processor"

    def __call__(self, run: Run) -> None:
        room = allocate_records(max(1, run.cold_bytes // 4096), RecordLayout((), 4096), torch.device("cpu")).view(-1)
        room.fill_(60)  # small numbers, both as weights and as scales
        for threads in self.threads_of(run.threads):
            native = load_kernels(threads)
            try:
                with torch_threads(threads):
                    self._measure(run, room, native, threads, self.tokens if threads == run.threads else (1,))
            finally:
                if native is not None:
                    native.close()

    def _measure(
        self, run: Run, room: torch.Tensor, native: NativeKernels | None, threads: int, all_tokens: tuple[int, ...]
    ) -> None:
        kinds = [
            (part, precision, layer_in(part, precision, room))
            for shape, precision in itertools.product(self.shapes, self.precisions)
            for part in (_fitting(shape, precision, room.nbytes),)
        ]
        kernels = [choose_kernel(expert_module(shape), layer, native) for shape, _, layer in kinds]
        # Single tokens first: plans need them most, should the time run out.
        for tokens, ((shape, precision, layer), kernel) in itertools.product(
            all_tokens, list(zip(kinds, kernels, strict=True))
        ):
            assert kernel is not None
            calls = _Calls(kernel, shape, layer.num_experts, tokens, layer.device)
            name = (
                f"{shape.hidden} x {shape.inner} {precision}, {counted(tokens, 'token')}, {counted(threads, 'thread')}"
            )
            seconds = run.steady(name, partial(seconds_here, calls), self.repeats) / calls.experts
            nbytes = layer.layout.nbytes
            run.found(ExpertTime("cpu", shape.hidden, shape.inner, precision, tokens, threads, nbytes, seconds))


@dataclass(frozen=True)
class CardExpertTimes:
    """On the device, with weights already there."""

    shapes: tuple[ExpertShape, ...]
    precisions: tuple[str, ...]
    tokens: tuple[int, ...]
    repeats: int
    estimated_s: float
    name: str = "experts on the graphics card"

    def __call__(self, run: Run) -> None:
        device = run.needed_device()
        nbytes = min(_DEVICE_BYTES, device.memory.free // 2)
        memory = device.memory.allocate(nbytes, MemoryCategory.STAGING)
        try:
            memory.fill_(60)
            for shape, precision in itertools.product(self.shapes, self.precisions):
                if expert_layout(shape, precision).nbytes > nbytes:
                    continue
                layer = layer_in(shape, precision, memory)
                kernel = choose_kernel(expert_module(shape), layer, None)
                assert kernel is not None
                for tokens in self.tokens:
                    calls = _Calls(kernel, shape, layer.num_experts, tokens, device.torch_device)
                    name = f"{shape.hidden} x {shape.inner} {precision}, {counted(tokens, 'token')}, graphics card"
                    seconds = run.steady(name, partial(seconds_on, device, calls), self.repeats)
                    run.found(
                        ExpertTime(
                            device.name.partition("#")[0],
                            shape.hidden,
                            shape.inner,
                            precision,
                            tokens,
                            0,
                            layer.layout.nbytes,
                            seconds / calls.experts,
                        )
                    )
        finally:
            device.memory.release(memory)


class _Calls:
    """Calls a kernel with different experts each time, each routed all tokens."""

    def __init__(self, kernel: ExpertKernel, shape: ExpertShape, held: int, tokens: int, place: torch.device) -> None:
        self.experts = min(_AT_ONCE, held)
        self._kernel = kernel
        self._x = torch.full((tokens, shape.hidden), 0.01, dtype=torch.bfloat16, device=place)
        self._weights = torch.full((tokens, self.experts), 1 / self.experts, device=place)
        order = torch.randperm(held, generator=torch.Generator().manual_seed(1)).repeat(2)
        self._indices = itertools.cycle(
            [
                order[begin : begin + self.experts].expand(tokens, -1).contiguous().to(place)
                for begin in range(0, held, self.experts)
            ]
        )

    def __call__(self) -> None:
        self._kernel(self._x, next(self._indices), self._weights)


def _fitting(shape: ExpertShape, precision: str, room_bytes: int) -> ExpertShape:
    """The expert, its inner width reduced until several of them fit into memory.

    A narrower part reads the same rows of gate and up and equally long blocks of down; the result is reported for the
    part: its widths, its bytes, its seconds.

    Raises:
        NotMeasuredError: not even a reduced one fits.
    """
    part = shape
    while _FEWEST * expert_layout(part, precision).nbytes > room_bytes:
        part = ExpertShape(shape.hidden, part.inner // 2 // _TILE * _TILE)
        if part.inner < NARROWEST:
            raise NotMeasuredError("too little free RAM for one expert")
    return part


def expert_module(shape: ExpertShape) -> StandardExperts:
    """A module that only defines the computation: it has no weights."""
    with torch.device("meta"):
        return StandardExperts(1, shape.hidden, shape.inner, torch.nn.SiLU())


def expert_layout(shape: ExpertShape, precision: str) -> RecordLayout:
    """How an expert's record is laid out."""
    shapes = {name: (tuple(p.shape[1:]), torch.bfloat16) for name, p in expert_module(shape).named_parameters()}
    plain = RecordLayout.of(shapes, transposed=False)
    of_all = tiled_format(precision)
    return plain if of_all is None else RecordLayout.in_tiles(plain, lambda _: of_all, Pairing.HALVES)


def layer_in(shape: ExpertShape, precision: str, room: torch.Tensor) -> LayerRecords:
    """As many experts as fit into the memory, up to a limit."""
    layout = expert_layout(shape, precision)
    count = min(room.nbytes // layout.nbytes, _MOST_EXPERTS)
    return LayerRecords("measured", layout, room[: count * layout.nbytes].view(count, layout.nbytes))
