"""Tests which kernels a card runs, with a small problem of each kind before it is used for the first time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial

import torch

from engine.formats import BF16, FORMATS, TiledFormat, WeightFormat
from engine.formats.ggml import GGML, BlockType
from engine.formats.tiles import Pairing, TiledMatrix, dequantise
from engine.kernels.cuda.attention import CudaAttention
from engine.kernels.cuda.compiled import CompileError
from engine.kernels.cuda.driver import DriverError, Launcher, card_of, open_card
from engine.kernels.cuda.products import (
    ROUND_KERNEL,
    CudaGroups,
    CudaProducts,
    CudaUnpacker,
    group_kernels,
    product_kernels,
    struct_of,
    unpack_kernel,
)
from engine.kernels.gpu.pages import PageTable
from engine.kernels.gpu.stored import CardKernels, RecordTable, StoredMatrix, group, matrix_in, store
from engine.kernels.interface import Activation, ActivationKind
from engine.kernels.native.paged_attention import (
    PAGE_TOKENS,
    AttentionTerms,
    KvShape,
    KvType,
    PagedLayer,
    Piece,
    Pieces,
)
from engine.kernels.reference import attend_in_torch
from engine.kernels.repack import Blocks, Unpack, quantise, unpacked

_log = logging.getLogger(__name__)

_MOST_FEW = 128
"""Visits up to which reading weights takes longer than computing, by an estimate, where both ways are there."""
_PROVEN_VISITS = (1, 2, 3, 40)
"""Of one expert: each has kernels of its own."""
_PROVEN_BLOCKS = (16, 64)
"""Of visits that are computed together: likewise."""


def kernels_of(device: torch.device) -> CardKernels | None:
    """The kernels that compute experts and linear layers on this device; `None`: PyTorch's operators do."""
    return None if device.type != "cuda" else _chosen(_index_of(device))[0]


def why_not(device: torch.device) -> str | None:
    """Why no kernels run on a device, in a few words; `None` if some do."""
    if device.type == "xpu":
        return "there are none for Intel's cards yet"
    if device.type == "mps":
        return "there are none for Apple's graphics yet"
    if device.type != "cuda":
        return "it is not a graphics card"
    return _chosen(_index_of(device))[1] or None


def reads_blocks(device: torch.device, formats: Iterable[tuple[str, str]]) -> bool:
    """Whether a device computes from rows of blocks of these types: of gate and up rows, or twice a matrix's own."""
    if device.type == "cpu":  # emulated: the CPU's kernels compute there
        return True
    return device.type == "cuda" and all(_reads_blocks(_index_of(device), *pair) for pair in sorted(formats))


@cache
def _reads_blocks(index: int, gate: str, up: str) -> bool:
    kernels, device = _chosen(index)[0], torch.device("cuda", index)
    if kernels is None or kernels.unpack is unpacked:  # which takes blocks through the host
        return False
    name = struct_of(GGML[gate], GGML[up])

    def is_right() -> bool:
        unpacking = [unpack_kernel(GGML[each]) for each in (gate, up)]
        open_card(index).prepare([*product_kernels(name), *group_kernels(name), *unpacking])
        return prove_blocks(device, kernels, GGML[gate], GGML[up])

    return _works(device, [(name, is_right)])


def _works(device: torch.device, tries: Iterable[tuple[str, Callable[[], bool]]]) -> bool:
    """Whether all of these are computed as they should be; the log says what is not."""
    what = ""
    try:
        with torch.inference_mode():
            for what, is_right in tries:
                if not is_right():
                    _log.warning("%s: computed wrongly on %s", what, device)
                    return False
    except Exception:  # any compiler or driver error: PyTorch's operators do it
        _log.warning("%s: no kernel computes it on %s", what, device, exc_info=True)
        return False
    return True


def prove_blocks(device: torch.device, kernels: CardKernels, gate: BlockType, up: BlockType) -> bool:
    """Compares products with gates and ups of these types, and what they are unpacked to, with the reference."""
    pairs, columns = 48, 768
    matrices = [_made_up(kind, pairs, columns) for kind in (gate, up)]
    meant = torch.cat([unpacked(each) for each in matrices])
    records = [store(each, None, device) for each in matrices]
    record = torch.cat([each for each, _ in records], dim=1)
    up_at = records[0][0].shape[1]
    matrix = replace(records[0][1], rows=2 * pairs, pairing=Pairing.HALVES, up=up, up_at=up_at)
    table = RecordTable([record])
    for each, (there, stored) in zip(matrices, records, strict=True):
        if not torch.equal(kernels.unpack(matrix_in(there[0], stored, each)).cpu(), unpacked(each)):
            return False
    ways = [_by_visits(kernels.few)]
    if kernels.many is not None:
        ways += [_by_groups(kernels.many, block) for block in _PROVEN_BLOCKS]
    return all(_multiplies(way, matrix, table, meant, visits, device) for visits in _PROVEN_VISITS for way in ways)


def _made_up(kind: BlockType, rows: int, columns: int) -> Blocks:
    """Any bytes are codes; scales are small numbers."""
    generator = torch.Generator().manual_seed(kind.id)
    blocks = rows * columns // kind.elements
    raw = torch.randint(0, 256, (blocks, kind.nbytes), dtype=torch.uint8, generator=generator)
    scales = torch.rand(blocks, generator=generator).mul_(2**-9).add_(2**-10)
    for at in kind.halves:
        raw[:, at : at + 2] = scales[:, None].half().view(torch.uint8)
    if kind.put is not None:
        kind.put(raw.numpy(), scales.numpy())
    return Blocks(kind, raw.view(rows, -1))


def _index_of(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@cache
def _chosen(index: int) -> tuple[CardKernels | None, str]:
    """The kernels of a card, or why there are none."""
    device = torch.device("cuda", index)
    try:
        products = cuda_products(device)
        with torch.inference_mode():
            wrong = prove(device, products)
        if wrong is None:
            many = groups_of(products, device)
            most_few = products.most_visits if many is None else _MOST_FEW
            return CardKernels(products, most_few, many, unpacker_of(products, device)), ""
        why = f"its kernels compute {wrong} wrongly"
    except (CompileError, DriverError) as error:
        why = str(error)
    except Exception as error:  # whatever it is: PyTorch's operators do it
        _log.warning("no kernels run on %s", device, exc_info=True)
        return None, f"its kernels failed ({type(error).__name__})"
    _log.warning("no kernels run on %s: %s", device, why)
    return None, why


def cuda_products(device: torch.device) -> CudaProducts:
    """What multiplies on a card; all kernels of products and unpacking are compiled then.

    Raises:
        CompileError, DriverError: there is no compiler or driver for it, or a kernel cannot be compiled.
    """
    card = open_card(_index_of(device))
    formats = _proven_formats()
    tiled = [each for each in formats if each.is_tiled]
    card.prepare(
        [
            ROUND_KERNEL,
            *(kernel for each in formats for kernel in product_kernels(struct_of(each))),
            *(kernel for each in tiled for kernel in group_kernels(struct_of(each))),
            *map(unpack_kernel, tiled),
        ]
    )
    return CudaProducts(card)


def prove(device: torch.device, products: CudaProducts) -> str | None:
    """Compares results with the reference; returns the first kind that is wrong."""

    for each in _proven_formats():
        if not all(_is_right(each, visits, device, _by_visits(products)) for visits in _PROVEN_VISITS):
            return each.name
    return None


def groups_of(products: CudaProducts, device: torch.device) -> CudaGroups | None:
    """What multiplies prompts on a card; `None` if that computes wrongly there."""
    groups = CudaGroups(products.card)

    def is_right(kind: WeightFormat) -> bool:
        most = _PROVEN_VISITS[-1]
        return all(_is_right(kind, most, device, _by_groups(groups, block)) for block in _PROVEN_BLOCKS)

    tries = [(f"prompts by {each.name}", partial(is_right, each)) for each in _proven_formats() if each.is_tiled]
    return groups if _works(device, tries) else None


def unpacker_of(products: CudaProducts, device: torch.device) -> Unpack:
    """What unpacks tiled matrices on a card: a kernel if it gives the same bits as PyTorch's operators, else those."""
    unpack = CudaUnpacker(products.card)

    def is_right(kind: TiledFormat) -> bool:
        weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(2)).bfloat16()
        matrix = quantise(weight, kind, Pairing.HALVES)
        record, stored = store(matrix, None, device)
        return torch.equal(unpack(matrix_in(record[0], stored, matrix)).cpu(), unpacked(matrix))

    tiled = [each for each in _proven_formats() if isinstance(each, TiledFormat)]
    tries = [(f"unpacking of {each.name}", partial(is_right, each)) for each in tiled]
    return unpack if _works(device, tries) else unpacked


def _proven_formats() -> list[WeightFormat]:
    return [each for each in FORMATS.values() if each is BF16 or (each.on_card and each.is_tiled)]


Multiply = Callable[[StoredMatrix, RecordTable, torch.Tensor, Activation], torch.Tensor]


def _by_visits(products: CudaProducts) -> Multiply:
    return lambda matrix, table, x, how: products.multiply_visits(matrix, table, x, _of_one(x), 1, how)


def _by_groups(groups: CudaGroups, block: int) -> Multiply:
    return lambda matrix, table, x, how: groups.multiply_groups(
        matrix, table, x, len(x), group(_of_one(x), 1, block), block, 1, how
    )


def _of_one(x: torch.Tensor) -> torch.Tensor:
    """Ids of visits that all are the first expert's."""
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


def _is_right(of_weights: WeightFormat, visits: int, device: torch.device, multiply: Multiply) -> bool:
    rows, columns = 96, 160
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).mul_(columns**-0.5).bfloat16()
    if not isinstance(of_weights, TiledFormat):
        record = weight.view(torch.uint8).reshape(1, -1).to(device)
        matrix, meant = StoredMatrix(rows, columns, torch.bfloat16, None, Pairing.HALVES, 0), weight
    else:
        tiles: TiledMatrix = quantise(weight, of_weights, Pairing.HALVES)
        meant = dequantise(tiles)
        record, matrix = store(tiles, None, device)
    return _multiplies(multiply, matrix, RecordTable([record]), meant, visits, device, within=0.05)


def _multiplies(
    multiply: Multiply,
    matrix: StoredMatrix,
    table: RecordTable,
    meant: torch.Tensor,
    visits: int,
    device: torch.device,
    within: float | None = None,
) -> bool:
    """Whether products with gates and ups are those with the weights that are meant.

    Args:
        within: how far off they may be; by default a share of the largest.
    """
    x = torch.randn(visits, meant.shape[1], generator=torch.Generator().manual_seed(visits)).bfloat16()
    gate, up = (x.float() @ meant.float().T).chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    found = multiply(matrix, table, x.to(device), Activation(ActivationKind.SILU, Pairing.HALVES))
    limit = 0.03 * float(wanted.abs().max()) if within is None else within
    return bool(torch.allclose(found.float().cpu(), wanted, rtol=0.05, atol=limit))


_PROVEN_HELD = (0, 45, 300)
"""Tokens before: nobody else, a part of one block, several blocks whose parts are added."""
_WINDOW = 70


class ProvenAttention:
    """Attention over pages of one card that is known to compute what the definition says."""

    def __init__(self, attention: CudaAttention) -> None:
        self._attention = attention
        self._right: dict[tuple[KvShape, KvType, torch.dtype], bool] = {}

    def attend(
        self,
        table: PageTable,
        terms: AttentionTerms,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        held: torch.Tensor,
        *,
        are_stored: bool = False,
    ) -> torch.Tensor:
        """See `CudaAttention.attend`; a shape that is met for the first time is tried before.

        Raises:
            LookupError: the card has no kernel for it, or it computes something else; nothing was done.
        """
        shape = KvShape(queries.shape[1], keys.shape[1], keys.shape[2], values.shape[2])
        kind = shape, table.kv_type, queries.dtype
        if kind not in self._right:
            self._right[kind] = prove_attention(queries.device, self._attention, shape, table.kv_type, queries.dtype)
        if not self._right[kind]:
            raise LookupError("the card computes no attention with such heads")
        return self._attention.attend(table, terms, queries, keys, values, held, are_stored=are_stored)


def attention_of(device: torch.device) -> ProvenAttention | None:
    """Attention of a card by a kernel; `None`: PyTorch's operators do it."""
    card = card_of(device)
    return _of_card(card) if card is not None else None


@cache
def _of_card(card: Launcher) -> ProvenAttention:
    return ProvenAttention(CudaAttention(card))


def prove_attention(
    device: torch.device, attention: CudaAttention, shape: KvShape, kv_type: KvType, states: torch.dtype
) -> bool:
    """Whether the card computes attention of this shape as the definition does.  Raises nothing."""
    plain = AttentionTerms(shape.key_dim**-0.5)
    sinks = torch.linspace(-1, 1, shape.heads)
    tries = [
        partial(_attends, device, attention, shape, kv_type, states, terms, held)
        for terms in (plain, replace(plain, window=_WINDOW, kept=3, softcap=20.0, sinks=sinks))
        for held in _PROVEN_HELD
    ]
    name = f"attention of {shape} over {kv_type.name}"
    return attention.takes(shape) and _works(device, [(name, each) for each in tries])


def _attends(
    device: torch.device,
    attention: CudaAttention,
    shape: KvShape,
    kv_type: KvType,
    states: torch.dtype,
    terms: AttentionTerms,
    held: int,
) -> bool:
    generator = torch.Generator().manual_seed(held)
    pages = held // PAGE_TOKENS + 1
    layer = PagedLayer(shape, kv_type, pages)
    for part in (layer.keys, layer.values):
        drawn = torch.randn(part.shape, generator=generator)
        part.copy_((drawn * 40).clamp(-127, 127).round() if kv_type is KvType.INT8 else drawn)
    for scales in (layer.key_scales, layer.value_scales):
        if scales is not None:
            scales.copy_(torch.rand(scales.shape, generator=generator) / 40)
    parts = [part for part in (layer.keys, layer.values, layer.key_scales, layer.value_scales) if part is not None]
    order = torch.randperm(pages, generator=generator)
    there = [part.to(device, copy=True) for part in parts]
    table = PageTable(kv_type, 1, pages, device)
    table.set_pages(0, order, there)
    new = [
        torch.randn(1, heads, dim, generator=generator).to(states)
        for heads, dim in (
            (shape.heads, shape.key_dim),
            (shape.kv_heads, shape.key_dim),
            (shape.kv_heads, shape.value_dim),
        )
    ]
    # The definition first: it stores the token in its pages, as the card is to do.
    wanted = attend_in_torch(layer, terms, Pieces([Piece(order.to(torch.int32), held, 1)]), *new)
    sinks = terms.sinks.to(device) if terms.sinks is not None else None
    on_card = replace(terms, sinks=sinks)
    before = torch.tensor([held], device=device)
    queries, keys, values = (each.to(device) for each in new)
    out = attention.attend(table, on_card, queries, keys, values, before)
    stored = all(
        torch.allclose(found.cpu().float(), meant.float(), rtol=1e-2, atol=1.0 if kv_type is KvType.INT8 else 1e-3)
        for found, meant in zip(there, parts, strict=True)
    )
    return stored and bool(torch.allclose(out.float().cpu(), wanted.float(), rtol=0.03, atol=0.02))
