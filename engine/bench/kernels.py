"""CPU expert kernels on cold weights, in every precision and instruction set, against the machine's read bandwidth."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.bench.report import Report, in_turn
from engine.experts.dispatch import StandardExperts
from engine.experts.record import allocate_records
from engine.formats import FORMATS
from engine.formats.ggml import GGML
from engine.formats.lut4 import LUT4, MXFP4_TABLE
from engine.formats.tiles import Pairing, RecordLayout
from engine.kernels.interface import ExpertKernel, ExpertMath, LayerRecords
from engine.kernels.native.build import build
from engine.kernels.native.experts import NativeExperts
from engine.kernels.native.library import Isa, NativeKernels, load_kernels, proven
from engine.kernels.torch_experts import TorchExperts
from engine.measure.arithmetic import MemoryReader, spread_of
from engine.runtime.load.model import set_threads


@dataclass(frozen=True)
class Weights:
    """What experts hold.

    Attributes:
        precision: name of the format, or of the type of GGUF files, which are read as they lie.
        table: of the matrices; `None`: the format's own, if it has one.
    """

    name: str
    precision: str
    table: tuple[int, ...] | None = None


WEIGHTS = (
    *(Weights(each.name, each.name) for each in FORMATS.values() if each.native is not None),
    Weights("lut4 (MXFP4)", LUT4.name, MXFP4_TABLE),
    *(Weights(kind.name, kind.name) for kind in GGML.values() if kind.is_blocks),
)
_BESIDE = {"lut4": "int4"}
"""Precision -> the one whose weights per second in the same run its own are divided by."""
_COLD_BYTES = 3 * 2**29
"""Bytes of weights that a run cycles through: more than any cache holds."""
_LIMIT = "read"
_CALL_SECONDS = 0.15
"""Duration of a burst of calls: long enough for the clock, short enough to alternate often."""


@dataclass(frozen=True)
class KernelShape:
    """One layer of a published model.

    Attributes:
        hidden, inner: widths of an expert.
        top_k: experts per token.
    """

    name: str
    hidden: int
    inner: int
    top_k: int


SHAPES = (
    KernelShape("Qwen3-30B-A3B", 2048, 768, 8),
    KernelShape("Mixtral-8x7B", 4096, 14336, 2),
    KernelShape("gpt-oss", 2880, 2880, 4),
)


def bench_kernels(
    threads: int | None,
    repeats: int,
    *,
    shapes: tuple[KernelShape, ...] = SHAPES,
    tokens: int = 1,
    on_progress: Callable[[str], None] = lambda _what: None,
) -> Report:
    """GB of weights per second for a layer's experts with `tokens` tokens, by our kernels and torch's operators.

    Needs about 4 GB of RAM.  Without native kernels, only torch's operators are measured.
    """
    count = set_threads(threads)
    report = Report({"threads": count})
    isas = proven(build())
    limits: list[float] = []
    for shape in shapes:
        for each in WEIGHTS:
            on_progress(f"{shape.name} {each.name}")
            limits += _bench_shape(report, shape, each, isas, count, repeats, tokens)
    report.machine["read_bandwidth_gb_per_s"] = statistics.median(limits)
    report.machine["read_bandwidth_spread"] = spread_of(limits)
    return report


def _bench_shape(
    report: Report, shape: KernelShape, weights: Weights, isas: list[Isa], threads: int, repeats: int, tokens: int
) -> list[float]:
    """Adds the rows of one shape; returns the read bandwidths that were measured in turn with them, GB/s."""
    module = StandardExperts(1, shape.hidden, shape.inner, torch.nn.SiLU())
    kind = GGML.get(weights.precision)
    if kind is not None and (shape.hidden % kind.elements or shape.inner % kind.elements):
        return []  # files of such a model have no blocks of this type
    layer = _layer(module, shape, weights)
    beside = _BESIDE.get(weights.precision)
    other = None if beside is None else _layer(module, shape, Weights(beside, beside))
    math = ExpertMath.of(module)
    # The limit is measured in turn too: memory speed varies, on virtual machines by several times.
    reader = MemoryReader()
    runs: dict[str, Callable[[], float]] = {_LIMIT: _Read(layer, reader, shape.top_k)}
    pools: list[NativeKernels] = []
    if weights.precision == "bf16":
        runs["torch"] = _Run(TorchExperts(layer, math), layer, shape, tokens)
    best = load_kernels(threads)
    if best is not None:
        pools.append(best)
        for isa in isas:
            kernels = NativeKernels(best._library, isa, threads)
            pools.append(kernels)
            for each in (layer, other):
                if each is not None:
                    kernel = NativeExperts(each, math, kernels, many_tokens=TorchExperts(each, math, kernels))
                    name = isa.name if each is layer else _peer_of(isa)
                    runs[name] = _With(best, isa, _Run(kernel, each, shape, tokens))
    try:
        turns = {name: (lambda _repeat, run=run: run()) for name, run in runs.items()}
        values = in_turn(turns, repeats, report, lambda _turn: None)
    finally:
        reader.close()
        for pool in pools:
            pool.close()
    limits = values.pop(_LIMIT)
    for isa in isas if best is not None else ():
        peer, peer_values = ("torch", values.get("torch"))
        if other is not None:
            # As many weights have fewer bytes in one than in the other.
            share = layer.layout.nbytes / other.layout.nbytes
            peer, peer_values = f"{beside}, as many weights", [rate * share for rate in values[_peer_of(isa)]]
        report.add(
            f"{shape.name} top-{shape.top_k} {weights.name} {isa.name}",
            values[isa.name],
            "GB/s",
            peer=peer if peer_values else None,
            peer_values=peer_values,
            limit=statistics.median(limits),
        )
    return limits


def _peer_of(isa: Isa) -> str:
    return f"{isa.name} of the other format"


class _Read:
    """Reads records as a kernel does, some at a time, each time others, by as many threads; returns GB per second."""

    def __init__(self, layer: LayerRecords, reader: MemoryReader, at_once: int) -> None:
        whole = layer.records.shape[0] // at_once * at_once
        self._pieces = itertools.cycle(layer.records[:whole].view(-1, at_once * layer.layout.nbytes))
        self._reader = reader

    def __call__(self) -> float:
        nbytes, begin = 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < _CALL_SECONDS or not nbytes:
            piece = next(self._pieces)
            self._reader.seconds(piece)
            nbytes += piece.nbytes
        return nbytes / taken / 1e9


class _Run:
    """Calls one kernel with different experts each time; returns GB of weights per second."""

    def __init__(self, kernel: ExpertKernel, layer: LayerRecords, shape: KernelShape, tokens: int) -> None:
        self._kernel = kernel
        self._chosen = _ever_other(layer.num_experts, shape.top_k)
        self._weights = torch.full((tokens, shape.top_k), 1 / shape.top_k)
        self._x = torch.randn(tokens, shape.hidden).bfloat16()
        self._bytes = shape.top_k * layer.layout.nbytes

    def __call__(self) -> float:
        calls, begin = 0, time.perf_counter()
        while (taken := time.perf_counter() - begin) < _CALL_SECONDS or calls < 2:
            index = torch.tensor([next(self._chosen)]).expand(self._x.shape[0], -1)
            self._kernel(self._x, index, self._weights)
            calls += 1
        return calls * self._bytes / taken / 1e9


class _With:
    """A run with an instruction set: the choice is global state of the library."""

    def __init__(self, kernels: NativeKernels, isa: Isa, run: Callable[[], float]) -> None:
        self._kernels, self._isa, self._run = kernels, isa, run

    def __call__(self) -> float:
        self._kernels._library.switchyard_use_isa(int(self._isa))
        try:
            return self._run()
        finally:
            self._kernels._library.switchyard_use_isa(int(self._kernels.isa))


def _ever_other(experts: int, top_k: int) -> Iterator[list[int]]:
    generator = random.Random(1)
    while True:
        order = list(range(experts))
        generator.shuffle(order)
        for begin in range(0, experts - top_k + 1, top_k):
            yield order[begin : begin + top_k]


def _layer(module: StandardExperts, shape: KernelShape, weights: Weights) -> LayerRecords:
    """Copies of one random expert, so many that none is cached when it is used again."""
    plain = RecordLayout.of(
        {name: (tuple(p.shape[1:]), torch.bfloat16) for name, p in module.named_parameters()}, transposed=False
    )
    layout: RecordLayout = plain
    kind = GGML.get(weights.precision)
    if kind is not None:
        layout = RecordLayout.in_blocks(plain, {"gate_up_proj": [kind] * 2, "down_proj": [kind]}, alternates=False)
    elif weights.precision != "bf16":
        layout = RecordLayout.in_tiles(plain, lambda _: FORMATS[weights.precision], Pairing.HALVES)
    count = max(2 * shape.top_k, _COLD_BYTES // layout.nbytes)
    layer = LayerRecords(shape.name, layout, allocate_records(count, layout, torch.device("cpu")))
    layer.records.fill_(60)  # as scales and weights in bf16: small numbers
    if layout.tiled:
        for expert in range(count):
            for name in ("gate_up_proj", "down_proj"):
                layout.matrix(layer.rows, name, expert).set_table(weights.table)
    return layer
