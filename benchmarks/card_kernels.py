"""`python -m benchmarks.card_kernels`: what the kernels take of each kind of card, and how long steps may take on some.

The first table is an estimate. The second compiles every kernel, which needs NVIDIA's compiler but no card; with
`--estimates` it is left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from engine.formats import FORMATS, TiledFormat, WeightFormat
from engine.formats.ggml import BLOCK_TYPES
from engine.formats.tiles import Pairing
from engine.kernels.cuda.attention import attention_kernels, latent_kernels
from engine.kernels.cuda.compiled import CompileError, Kernel, compile_kernel, find_nvrtc
from engine.kernels.cuda.exchange import exchange_kernels
from engine.kernels.cuda.products import ROUND_KERNEL, grid_of, group_kernels, product_kernels, struct_of, unpack_kernel
from engine.kernels.gpu.modules import ANGLES_KERNEL, NORM_KERNEL
from engine.kernels.gpu.rotations import ROTARY_KERNEL
from engine.kernels.gpu.routers import router_kernels
from engine.kernels.gpu.stored import StoredMatrix

LAUNCH_S = 1.3e-6
"""Between two dependent kernels of a graph: published measurements are from 1.0 to 1.6 us."""
CHAIN_S = 1.5e-6
"""Ids, slot and address of a record one after the other, and the sum over warps at the end."""
LATENCY_S = 0.7e-6
"""Of memory that is busy."""
REACHED = 0.85
"""Of the bandwidth, by a kernel that has enough on its way."""
BLOCK_BYTES = 128 * 16 * 3
"""On its way per block: 16 bytes of each thread, 2 to 4 times."""
RESIDENT_BLOCKS = 4
"""Per multiprocessor, by the registers of the kernels for one to three rows."""


@dataclass(frozen=True, slots=True)
class Card:
    """A card by its data sheet."""

    name: str
    gbps: float
    multiprocessors: int


CARDS = (
    Card("RTX 3060", 360, 28),
    Card("RTX 4060 Ti", 288, 34),
    Card("RTX 4090", 1008, 128),
    Card("RTX 5090", 1792, 170),
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decode step multiplies with.

    Attributes:
        inner: width between an expert's matrices.
        query_rows, kv_rows: outputs of the projections for queries, and for keys and for values.
        others: launches of a layer beside products and experts: norms, rotation, router, attention, sums.
        of_token: launches beside layers and head: embedding, angles of the position, the last norm.
    """

    layers: int
    hidden: int
    inner: int
    per_token: int
    query_rows: int
    kv_rows: int
    vocabulary: int
    others: int
    of_token: int


QWEN3_30B_A3B = ModelShape(48, 2048, 768, 8, 4096, 512, 151_936, others=58, of_token=12)
"""`others` and `of_token`: PyTorch's operators, counted; some of them start several kernels."""
FUSED_OTHERS = 5
"""With kernels of their own: two norms with the residual sums before them, rotation with the norms of queries and keys,
attention over pages, router.  Counted."""
FUSED_OF_TOKEN = 4
"""Likewise: embedding, what is filled with zeros, angles, the last norm."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """An estimate.

    Attributes:
        nbytes: read from the card's memory.
        bound_s: what reading them at full bandwidth takes: nothing is faster.
    """

    launches: int
    nbytes: int
    seconds: float
    bound_s: float


def product_seconds(card: Card, of_weights: WeightFormat, rows: int, columns: int, visits: int = 1) -> float:
    """Seconds of one launch that multiplies a row with `visits` matrices [rows, columns].

    It costs what starting it after another in a graph does, then the chain of reads that every block goes through
    before its first weights arrive, and then its bytes at the rate that its blocks can ask for: by Little's law what is
    on its way at once over the memory's latency, and never more than a part of the card's bandwidth.
    """
    tiled = of_weights if isinstance(of_weights, TiledFormat) else None
    matrix = StoredMatrix(rows, columns, torch.bfloat16, tiled, Pairing.PLAIN, 0)
    leaders, blocks, splits = grid_of(matrix, visits, card.multiprocessors)
    at_once = min(leaders * blocks * splits, RESIDENT_BLOCKS * card.multiprocessors)
    rate = min(at_once * BLOCK_BYTES / LATENCY_S, REACHED * card.gbps * 1e9)
    return LAUNCH_S + CHAIN_S + visits * sum(of_weights.part_bytes(rows, columns)) / rate


def products(shape: ModelShape) -> Iterator[tuple[int, int, int, int]]:
    """Rows, columns, visits, and how often in a step, of each product."""
    yield 2 * shape.inner, shape.hidden, shape.per_token, shape.layers
    yield shape.hidden, shape.inner, shape.per_token, shape.layers
    yield shape.query_rows + 2 * shape.kv_rows, shape.hidden, 1, shape.layers
    yield shape.hidden, shape.query_rows, 1, shape.layers
    yield shape.vocabulary, shape.hidden, 1, 1


def estimate(card: Card, shape: ModelShape, of_weights: WeightFormat, kv_tokens: int = 0) -> StepTime:
    """A decode step of one token whose experts are all in slots, as one graph.

    Args:
        kv_tokens: before it, whose keys and values are read in 16 bits.
    """
    launches, nbytes = shape.layers * shape.others + shape.of_token, 0
    seconds = launches * LAUNCH_S
    for rows, columns, visits, times in products(shape):
        launches += times
        nbytes += times * visits * sum(of_weights.part_bytes(rows, columns))
        seconds += times * product_seconds(card, of_weights, rows, columns, visits)
    of_cache = shape.layers * kv_tokens * 2 * shape.kv_rows * 2
    bound = (nbytes + of_cache) / (card.gbps * 1e9)
    return StepTime(launches, nbytes + of_cache, seconds + of_cache / (REACHED * card.gbps * 1e9), bound)


_ARCHITECTURES = (61, 70, 75, 80, 86, 89, 90, 120)
_KV_TOKENS = 4096


def all_kernels() -> list[Kernel]:
    """Every kernel that any card may be asked for."""
    on_cards = [each for each in FORMATS.values() if each.on_card]
    in_blocks = [each for each in BLOCK_TYPES.values() if each.is_blocks]
    packed = [*(each for each in on_cards if each.is_tiled), *in_blocks]
    unpacking = [unpack_kernel(each) for each in packed]
    products = [kernel for each in (*on_cards, *in_blocks) for kernel in product_kernels(struct_of(each))]
    groups = [ROUND_KERNEL, *(kernel for each in packed for kernel in group_kernels(struct_of(each)))]
    attention = [*attention_kernels(), *latent_kernels()]
    others = [NORM_KERNEL, ROTARY_KERNEL, ANGLES_KERNEL, *router_kernels()]
    return [*products, *groups, *unpacking, *attention, *others]


def nvidia_kernels() -> list[Kernel]:
    """The same, with those that only NVIDIA's cards run."""
    return [*all_kernels(), *exchange_kernels()]


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes of a card, in the compiler's words.

    Attributes:
        registers: per thread.
        shared_bytes: per block.
        spilled_bytes: that registers did not suffice for.
    """

    registers: int
    shared_bytes: int
    spilled_bytes: int


def usage_in(log: str) -> Usage:
    """Reads the log of a source with one kernel, compiled with `--ptxas-options=-v`."""
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        raise ValueError(f"no registers in {log!r}")
    shared = re.search(r"(\d+) bytes smem", log)
    spilled = re.findall(r"(\d+) bytes spill", log)
    return Usage(int(registers[1]), int(shared[1]) if shared else 0, sum(map(int, spilled)))


def usage_rows() -> Iterator[list[str]]:
    """Registers of each kernel by architecture, as far as the compiler that is found knows them; + where they spill."""
    compiler = find_nvrtc()
    known = [each for each in _ARCHITECTURES if each in compiler.architectures()]
    yield ["kernel", "KiB shared", *(f"sm_{each}" for each in known)]
    for kernel in nvidia_kernels():
        found = [usage_in(compile_kernel(kernel, each, compiler).log) for each in known]
        registers = (f"{each.registers}{'+' if each.spilled_bytes else ''}" for each in found)
        yield [kernel.name, f"{max(each.shared_bytes for each in found) / 1024:.1f}", *registers]


def time_rows() -> Iterator[list[str]]:
    """Estimated tokens per second of Qwen3-30B-A3B with all experts on the card."""
    yield [
        "card",
        "format",
        "GB a token",
        "bandwidth alone",
        "launches",
        "tokens/s",
        "launches, fused",
        "tokens/s, fused",
    ]
    fused = replace(QWEN3_30B_A3B, others=FUSED_OTHERS, of_token=FUSED_OF_TOKEN)
    for card in CARDS:
        for name in ("int4", "int8"):
            now = estimate(card, QWEN3_30B_A3B, FORMATS[name], _KV_TOKENS)
            then = estimate(card, fused, FORMATS[name], _KV_TOKENS)
            speeds = [f"{1 / now.bound_s:.0f}", str(now.launches), f"{1 / now.seconds:.0f}"]
            yield [card.name, name, f"{now.nbytes / 1e9:.2f}", *speeds, str(then.launches), f"{1 / then.seconds:.0f}"]


def _print(rows: Iterator[list[str]]) -> None:
    for number, row in enumerate(rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
        if number == 0:
            sys.stdout.write(f"|{'---|' * len(row)}\n")
    sys.stdout.write("\n")


def main(arguments: list[str]) -> int:
    """0, or 1 if there is no compiler."""
    sys.stdout.write(f"Estimated, with {_KV_TOKENS} tokens before:\n\n")
    _print(time_rows())
    if arguments == ["--estimates"]:
        return 0
    try:
        sys.stdout.write("Registers per thread, + where they do not suffice:\n\n")
        _print(usage_rows())
    except CompileError as error:
        sys.stderr.write(f"{error}.\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
