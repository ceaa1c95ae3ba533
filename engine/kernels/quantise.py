"""Matrices to tiles and back: by the native kernels where that is possible, in torch elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from engine.formats import TiledFormat
from engine.formats.tiles import ROUNDS, Pairing, RecordLayout, TiledMatrix, TiledShape, quantise_in_torch
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.structs import matrix_struct


def quantise_natively(weight: torch.Tensor, target: TiledMatrix, kernels: NativeKernels, rounds: int = ROUNDS) -> None:
    """Fills `target` from `weight`: bf16 [rows, columns], contiguous, in RAM, like `target`."""
    struct = matrix_struct(target)
    kernels.quantise(kernels.pool, ctypes.addressof(struct), weight.data_ptr(), rounds)


def dequantise_natively(matrix: TiledMatrix, begin: int, end: int, out: torch.Tensor, kernels: NativeKernels) -> None:
    """Blocks [begin, end) of a matrix in RAM to `out`: bf16 [rows, columns], contiguous, paired like the matrix.

    The same values as `engine.formats.tiles.dequantise`.
    """
    struct = matrix_struct(matrix)
    kernels.dequantise(kernels.pool, ctypes.addressof(struct), begin, end, out.data_ptr())


def quantise(
    weight: torch.Tensor,
    target_format: TiledFormat,
    pairing: Pairing = Pairing.PLAIN,
    kernels: NativeKernels | None = None,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> TiledMatrix:
    """[rows, columns] -> the same in `target_format`, on the same device; `empty` allocates it, like torch's."""
    rows, columns = weight.shape
    target = TiledMatrix.empty(TiledShape(rows, columns, target_format, pairing), weight.device, empty)
    quantise_into(weight, target, kernels)
    return target


def quantise_into(weight: torch.Tensor, target: TiledMatrix, kernels: NativeKernels | None = None) -> None:
    """Fills `target` from `weight` [rows, columns]: hundreds of megabytes per second and thread natively."""
    target.set_table()
    native = kernels is not None and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    if native and weight.device.type == "cpu" and target.weights.device.type == "cpu":
        assert kernels is not None
        quantise_natively(weight, target, kernels)
    else:
        quantise_in_torch(weight, target)


def quantise_record(
    layout: RecordLayout, plain: torch.Tensor, target: torch.Tensor, kernels: NativeKernels | None = None
) -> None:
    """Fills a record in tiles, uint8 [nbytes], from the same in plain numbers, both aligned as records are."""
    target.zero_()  # also between the parts, so that equal experts have equal bytes
    parts = layout.views(target[None])
    for name, values in layout.unquantised.views(plain[None]).items():
        if layout.is_tiled(name):
            quantise_into(values[0], layout.matrix(parts, name, 0), kernels)
        else:
            parts[name].copy_(values)
