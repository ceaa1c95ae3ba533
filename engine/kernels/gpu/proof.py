"""Tests once which kernels a card runs, with a small problem of each kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from engine.formats import BF16, FORMATS, TiledFormat, WeightFormat
from engine.formats.tiles import Pairing, TiledMatrix, dequantise
from engine.kernels.activation import Activation, ActivationKind
from engine.kernels.cuda.driver import open_card
from engine.kernels.cuda.groups import ROUND_KERNEL, CudaGroups, group_kernels
from engine.kernels.cuda.launcher import DriverError
from engine.kernels.cuda.nvrtc import CompileError
from engine.kernels.cuda.products import CudaProducts, product_kernels
from engine.kernels.cuda.unpack import CudaUnpacker, unpack_kernel
from engine.kernels.gpu.stored import CardKernels, RecordTable, StoredMatrix, group, matrix_in, store
from engine.kernels.quantise import quantise

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
    card.prepare(
        [
            ROUND_KERNEL,
            *(kernel for each in formats for kernel in (*product_kernels(each), *group_kernels(each))),
            *(unpack_kernel(each) for each in formats if each.is_tiled),
        ]
    )
    return CudaProducts(card)


def prove(device: torch.device, products: CudaProducts) -> str | None:
    """Compares results with the reference; returns the first kind that is wrong."""

    def multiply(matrix: StoredMatrix, table: RecordTable, x: torch.Tensor, how: Activation) -> torch.Tensor:
        ids = torch.zeros(len(x), dtype=torch.int64, device=device)
        return products.multiply_visits(matrix, table, x, ids, 1, how)

    for each in _proven_formats():
        if not all(_is_right(each, visits, device, multiply) for visits in _PROVEN_VISITS):
            return each.name
    return None


def groups_of(products: CudaProducts, device: torch.device) -> CudaGroups | None:
    """What multiplies prompts on a card; `None` if that computes wrongly there."""
    groups = CudaGroups(products.card)
    try:
        with torch.inference_mode():
            for each in _proven_formats():
                for block in _PROVEN_BLOCKS if each.is_tiled else ():

                    def multiply(
                        matrix: StoredMatrix, table: RecordTable, x: torch.Tensor, how: Activation, block: int = block
                    ) -> torch.Tensor:
                        ids = torch.zeros(len(x), dtype=torch.int64, device=device)
                        return groups.multiply_groups(matrix, table, x, len(x), group(ids, 1, block), block, 1, how)

                    if not _is_right(each, _PROVEN_VISITS[-1], device, multiply):
                        _log.warning("%s is multiplied wrongly for prompts on %s", each.name, device)
                        return None
    except Exception:  # as in `_chosen`
        _log.warning("prompts are not multiplied by a kernel on %s", device, exc_info=True)
        return None
    return groups


def unpacker_of(products: CudaProducts, device: torch.device) -> Callable[[TiledMatrix], torch.Tensor]:
    """What unpacks tiled matrices on a card: a kernel if it gives the same bits as PyTorch's operators, else those."""
    unpack = CudaUnpacker(products.card)
    try:
        for each in _proven_formats():
            if isinstance(each, TiledFormat):
                weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(2)).bfloat16()
                matrix = quantise(weight, each, Pairing.HALVES)
                record, stored = store(matrix, None, device)
                if not torch.equal(unpack(matrix_in(record[0], stored, matrix)).cpu(), dequantise(matrix)):
                    _log.warning("%s is unpacked wrongly on %s", each.name, device)
                    return dequantise
    except Exception:  # as in `_chosen`
        _log.warning("tiled matrices are not unpacked by a kernel on %s", device, exc_info=True)
        return dequantise
    return unpack


def _proven_formats() -> list[WeightFormat]:
    return [each for each in FORMATS.values() if each is BF16 or (each.on_card and each.is_tiled)]


Multiply = Callable[[StoredMatrix, RecordTable, torch.Tensor, Activation], torch.Tensor]


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
