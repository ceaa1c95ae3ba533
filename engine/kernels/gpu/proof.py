"""Tests once which kernels a card runs, with a small problem of each kind, and chooses the quickest of them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from engine.formats import BF16, FORMATS, TiledFormat, WeightFormat
from engine.formats.int4 import INT4
from engine.formats.tiles import Pairing, TiledMatrix, TiledShape, dequantise
from engine.kernels.activation import Activation, ActivationKind
from engine.kernels.cuda.driver import open_card
from engine.kernels.cuda.groups import ROUND_KERNEL, CudaGroups, group_kernels
from engine.kernels.cuda.launcher import DriverError
from engine.kernels.cuda.nvrtc import CompileError
from engine.kernels.cuda.products import CudaProducts, product_kernels
from engine.kernels.cuda.unpack import CudaUnpacker, unpack_kernel
from engine.kernels.gpu.stored import (
    CardKernels,
    GroupedProducts,
    Products,
    RecordTable,
    StoredMatrix,
    group,
    matrix_in,
    store,
)
from engine.kernels.quantise import quantise

if TYPE_CHECKING:
    from engine.kernels.gpu.products import TritonProducts

_log = logging.getLogger(__name__)

_OLDEST_FOR_TRITON = (8, 0)
"""Compute capability of NVIDIA's first cards with bf16 matrix units."""
_MOST_FEW = 128
"""Visits up to which reading weights takes longer than computing, by an estimate, where both ways are there."""
_PROVEN_VISITS = (1, 2, 3, 40)
"""Of one expert: each has kernels of its own."""
_PROVEN_BLOCKS = (16, 64)
"""Of visits that are computed together: likewise."""
_TIMED_ROWS, _TIMED_COLUMNS, _TIMED_EXPERTS = 4096, 2048, 8
_TIMED_CALLS, _TIMED_RUNS = 10, 3


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
    triton, no_triton = _proven("Triton's kernels", device, triton_products)
    in_cuda, no_cuda = _proven("the kernels in CUDA C", device, cuda_products)
    if triton is None and in_cuda is None:
        return _Chosen(None, f"{no_triton}, and {no_cuda}")
    few = quickest([each for each in (in_cuda, triton) if each is not None], device)
    many = triton if triton is not None else groups_of(in_cuda, device)
    most_few = few.most_visits if many is None else min(few.most_visits, _MOST_FEW)
    return _Chosen(CardKernels(few, most_few, many, unpacker_of(in_cuda, device), in_cuda), "")


def triton_products(device: torch.device) -> TritonProducts:
    """Triton's kernels.  Raises `UnavailableError`."""
    if not _has_triton():
        raise UnavailableError("Triton is not installed")
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _OLDEST_FOR_TRITON:
        least = ".".join(map(str, _OLDEST_FOR_TRITON))
        raise UnavailableError(f"its compute capability is {capability[0]}.{capability[1]}, below {least}")
    from engine.kernels.gpu.products import TritonProducts

    return TritonProducts()


def cuda_products(device: torch.device) -> CudaProducts:
    """The kernels in CUDA C.  Raises `UnavailableError`."""
    try:
        card = open_card(_index_of(device))
    except (CompileError, DriverError) as error:
        raise UnavailableError(str(error)) from error
    formats = _proven_formats()
    unpacking = [unpack_kernel(each) for each in formats if each.is_tiled]
    groups = [ROUND_KERNEL, *(kernel for each in formats for kernel in group_kernels(each))]
    card.prepare(
        [
            *(kernel for each in formats for kernel in product_kernels(each)),
            *unpacking,
            *([] if _has_triton() else groups),
        ]
    )
    return CudaProducts(card)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


Made = TypeVar("Made", bound=Products)


class UnavailableError(Exception):
    """Kernels cannot be tried; the message says why in a few words."""


def _proven(name: str, device: torch.device, make: Callable[[torch.device], Made]) -> tuple[Made | None, str]:
    """The products if the card computes them right, and otherwise why not."""
    try:
        products = make(device)
        with torch.inference_mode():
            failed = prove(device, products)
    except UnavailableError as error:
        return None, str(error)
    except Exception as error:  # any compiler or driver error: other kernels or torch's operators do it
        _log.warning("%s do not run on %s", name, device, exc_info=True)
        return None, f"{name} failed ({type(error).__name__})"
    if failed is not None:
        _log.warning("%s compute %s wrongly on %s", name, failed, device)
        return None, f"{name} compute {failed} wrongly"
    return products, ""


def quickest(candidates: list[Products], device: torch.device) -> Products:
    """The products that take the least time for a token's experts, if there is a choice; the first if in doubt."""
    if len(candidates) == 1:
        return candidates[0]
    try:
        with torch.inference_mode():
            return min(candidates, key=lambda each: _seconds(each, device))
    except RuntimeError:  # the card has no memory left for it
        _log.warning("kernels could not be timed on %s", device, exc_info=True)
        return candidates[0]


def _seconds(products: Products, device: torch.device) -> float:
    """Of one product of eight visits with an int4 matrix each: long enough that starting kernels is hidden."""
    shape = TiledShape(_TIMED_ROWS, _TIMED_COLUMNS, INT4)
    record, matrix = store(TiledMatrix.empty(shape, empty=torch.zeros), None, device)
    table = RecordTable([record.repeat(_TIMED_EXPERTS, 1)])
    x = torch.zeros(1, _TIMED_COLUMNS, dtype=torch.bfloat16, device=device)
    ids = torch.arange(_TIMED_EXPERTS, device=device)
    found: list[float] = []
    for _ in range(_TIMED_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_TIMED_CALLS):
            products.multiply_visits(matrix, table, x, ids, _TIMED_EXPERTS)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found) * 1e-3 / _TIMED_CALLS


def prove(device: torch.device, products: Products) -> str | None:
    """Compares results with the reference; returns the first kind that is wrong.

    Products with `multiply_groups` (`GroupedProducts`) have it tried, too.
    """
    in_groups = getattr(products, "multiply_groups", None)
    for each in _proven_formats():
        for visits in _PROVEN_VISITS:

            def multiply(matrix: StoredMatrix, table: RecordTable, x: torch.Tensor, how: Activation) -> torch.Tensor:
                ids = torch.zeros(len(x), dtype=torch.int64, device=device)
                if len(x) > products.most_visits and in_groups is not None:
                    return cast("torch.Tensor", in_groups(matrix, table, x, len(x), group(ids, 1, 16), 16, 1, how))
                return products.multiply_visits(matrix, table, x, ids, 1, how)

            if not _is_right(each, visits, device, multiply):
                return each.name
    return None


def groups_of(in_cuda: CudaProducts | None, device: torch.device) -> GroupedProducts | None:
    """What multiplies prompts on a card without Triton: kernels in CUDA C if they compute right, else nothing."""
    if in_cuda is None:
        return None
    products = CudaGroups(in_cuda.card)
    try:
        with torch.inference_mode():
            for each in _proven_formats():
                for block in _PROVEN_BLOCKS if each.is_tiled else ():

                    def multiply(
                        matrix: StoredMatrix, table: RecordTable, x: torch.Tensor, how: Activation, block: int = block
                    ) -> torch.Tensor:
                        ids = torch.zeros(len(x), dtype=torch.int64, device=device)
                        return products.multiply_groups(matrix, table, x, len(x), group(ids, 1, block), block, 1, how)

                    if not _is_right(each, _PROVEN_VISITS[-1], device, multiply):
                        _log.warning("%s is multiplied wrongly for prompts on %s", each.name, device)
                        return None
    except Exception:  # as in `_proven`
        _log.warning("prompts are not multiplied by a kernel on %s", device, exc_info=True)
        return None
    return products


def unpacker_of(in_cuda: CudaProducts | None, device: torch.device) -> Callable[[TiledMatrix], torch.Tensor]:
    """What unpacks tiled matrices on a card: a kernel if it gives the same bits as PyTorch's operators, else those."""
    if in_cuda is None:
        return dequantise
    unpack = CudaUnpacker(in_cuda.card)
    try:
        for each in _proven_formats():
            if isinstance(each, TiledFormat):
                weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(2)).bfloat16()
                matrix = quantise(weight, each, Pairing.HALVES)
                record, stored = store(matrix, None, device)
                if not torch.equal(unpack(matrix_in(record[0], stored, matrix)).cpu(), dequantise(matrix)):
                    _log.warning("%s is unpacked wrongly on %s", each.name, device)
                    return dequantise
    except Exception:  # as in `_proven`
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
