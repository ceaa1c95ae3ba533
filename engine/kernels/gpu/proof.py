"""Tests once which kernels a card runs, with a small problem of each kind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch

from engine.formats import BF16, FORMATS, TiledFormat, WeightFormat
from engine.formats.ggml import GGML, BlockType
from engine.formats.tiles import Pairing, TiledMatrix, dequantise
from engine.kernels.cuda.compiled import CompileError
from engine.kernels.cuda.driver import DriverError, open_card
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
from engine.kernels.gpu.stored import CardKernels, RecordTable, StoredMatrix, group, matrix_in, store
from engine.kernels.interface import Activation, ActivationKind
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
    return None if device.type != "cuda" else _chosen(_index_of(device)).kernels


def why_not(device: torch.device) -> str | None:
    """Why no kernels run on a device, in a few words; `None` if some do."""
    if device.type == "xpu":
        return "there are none for Intel's cards yet"
    if device.type == "mps":
        return "there are none for Apple's graphics yet"
    if device.type != "cuda":
        return "it is not a graphics card"
    chosen = _chosen(_index_of(device))
    return None if chosen.kernels is not None else chosen.reason


def reads_blocks(device: torch.device, formats: Iterable[tuple[str, str]]) -> bool:
    """Whether a device computes from rows of blocks of these types: of gate and up rows, or twice a matrix's own."""
    if device.type == "cpu":  # emulated: the CPU's kernels compute there
        return True
    return device.type == "cuda" and all(_reads_blocks(_index_of(device), *pair) for pair in sorted(formats))


@cache
def _reads_blocks(index: int, gate: str, up: str) -> bool:
    kernels, device = _chosen(index).kernels, torch.device("cuda", index)
    if kernels is None or kernels.unpack is unpacked:  # which takes blocks through the host
        return False
    name = struct_of(GGML[gate], GGML[up])
    try:
        unpacking = [unpack_kernel(GGML[each]) for each in (gate, up)]
        open_card(index).prepare([*product_kernels(name), *group_kernels(name), *unpacking])
        with torch.inference_mode():
            is_right = prove_blocks(device, kernels, GGML[gate], GGML[up])
    except Exception:  # as in `_chosen`
        _log.warning("%s is not read on %s", name, device, exc_info=True)
        return False
    if not is_right:
        _log.warning("%s is multiplied wrongly on %s", name, device)
    return is_right


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
    activation = Activation(ActivationKind.SILU, Pairing.HALVES)
    for each, (there, stored) in zip(matrices, records, strict=True):
        if not torch.equal(kernels.unpack(matrix_in(there[0], stored, each)).cpu(), unpacked(each)):
            return False
    ways = [_by_visits(kernels.few)]
    if kernels.many is not None:
        ways += [_by_groups(kernels.many, block) for block in _PROVEN_BLOCKS]
    for visits in _PROVEN_VISITS:
        x = torch.randn(visits, columns, generator=torch.Generator().manual_seed(visits)).bfloat16()
        first, second = (x.float() @ meant.float().T).chunk(2, dim=-1)
        wanted = torch.nn.functional.silu(first) * second
        found = [multiply(matrix, table, x.to(device), activation) for multiply in ways]
        limit = 0.03 * float(wanted.abs().max())
        if not all(torch.allclose(each.float().cpu(), wanted, rtol=0.05, atol=limit) for each in found):
            return False
    return True


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


@dataclass(frozen=True)
class _Chosen:
    kernels: CardKernels | None
    reason: str


@cache
def _chosen(index: int) -> _Chosen:
    device = torch.device("cuda", index)
    try:
        products = cuda_products(device)
        with torch.inference_mode():
            wrong = prove(device, products)
    except (CompileError, DriverError) as error:
        _log.warning("no kernels run on %s: %s", device, error)
        return _Chosen(None, str(error))
    except Exception as error:  # whatever it is: PyTorch's operators do it
        _log.warning("no kernels run on %s", device, exc_info=True)
        return _Chosen(None, f"its kernels failed ({type(error).__name__})")
    if wrong is not None:
        _log.warning("the kernels compute %s wrongly on %s", wrong, device)
        return _Chosen(None, f"its kernels compute {wrong} wrongly")
    many = groups_of(products, device)
    most_few = products.most_visits if many is None else _MOST_FEW
    return _Chosen(CardKernels(products, most_few, many, unpacker_of(products, device)), "")


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
    try:
        with torch.inference_mode():
            for each in _proven_formats():
                for block in _PROVEN_BLOCKS if each.is_tiled else ():
                    if not _is_right(each, _PROVEN_VISITS[-1], device, _by_groups(groups, block)):
                        _log.warning("%s is multiplied wrongly for prompts on %s", each.name, device)
                        return None
    except Exception:  # as in `_chosen`
        _log.warning("prompts are not multiplied by a kernel on %s", device, exc_info=True)
        return None
    return groups


def unpacker_of(products: CudaProducts, device: torch.device) -> Unpack:
    """What unpacks tiled matrices on a card: a kernel if it gives the same bits as PyTorch's operators, else those."""
    unpack = CudaUnpacker(products.card)
    try:
        for each in _proven_formats():
            if isinstance(each, TiledFormat):
                weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(2)).bfloat16()
                matrix = quantise(weight, each, Pairing.HALVES)
                record, stored = store(matrix, None, device)
                if not torch.equal(unpack(matrix_in(record[0], stored, matrix)).cpu(), unpacked(matrix)):
                    _log.warning("%s is unpacked wrongly on %s", each.name, device)
                    return unpacked
    except Exception:  # as in `_chosen`
        _log.warning("tiled matrices are not unpacked by a kernel on %s", device, exc_info=True)
        return unpacked
    return unpack


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
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).bfloat16()
    x = torch.randn(visits, columns, generator=generator).bfloat16()
    activation = Activation(ActivationKind.SILU, Pairing.HALVES)
    if not isinstance(of_weights, TiledFormat):
        record = weight.view(torch.uint8).reshape(1, -1).to(device)
        matrix, meant = StoredMatrix(rows, columns, torch.bfloat16, None, Pairing.HALVES, 0), weight
    else:
        tiles: TiledMatrix = quantise(weight, of_weights, Pairing.HALVES)
        meant = dequantise(tiles)
        record, matrix = store(tiles, None, device)
    table = RecordTable([record])
    out = multiply(matrix, table, x.to(device), activation)
    gate, up = (x.float() @ meant.float().T).chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    return bool(torch.allclose(out.float().cpu(), wanted, rtol=0.05, atol=0.05))
