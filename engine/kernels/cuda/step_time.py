"""How long a decode step takes on a card, from its launches and bytes: an estimate until a card has been measured.

A launch costs what starting it after another in a graph does, then the chain of reads that every block goes through
before its first weights arrive, and then its bytes at the rate that its blocks can ask for. By Little's law that is
what is on its way at once over the memory's latency, and never more than a part of the card's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.formats import TiledFormat, WeightFormat
from engine.formats.tiles import Pairing
from engine.kernels.cuda.products import grid_of
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
    """A card by its data sheet.

    Attributes:
        gbps: of its memory, in 1e9 bytes per second.
    """

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
    """Seconds of one launch that multiplies a row with `visits` matrices [rows, columns]."""
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
