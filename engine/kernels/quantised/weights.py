"""Matrices to tiles: natively where that is possible, in torch elsewhere."""

from __future__ import annotations

import torch

from engine.kernels.native.convert import quantise_natively
from engine.kernels.native.library import NativeKernels
from engine.kernels.quantised.fit import quantise_in_torch
from engine.kernels.quantised.tiles import Pairing, TiledMatrix, TiledShape


def quantise(
    weight: torch.Tensor, precision: str, pairing: Pairing = Pairing.PLAIN, kernels: NativeKernels | None = None
) -> TiledMatrix:
    """[rows, columns] -> the same in `precision` (`int8`, `int4`), on the same device."""
    rows, columns = weight.shape
    target = TiledMatrix.empty(TiledShape(rows, columns, precision, pairing), weight.device)
    quantise_into(weight, target, kernels)
    return target


def quantise_into(weight: torch.Tensor, target: TiledMatrix, kernels: NativeKernels | None = None) -> None:
    """Fills `target` from `weight` [rows, columns]: hundreds of megabytes per second and thread natively."""
    native = kernels is not None and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    if native and weight.device.type == "cpu" and target.weights.device.type == "cpu":
        assert kernels is not None
        quantise_natively(weight, target, kernels)
    else:
        quantise_in_torch(weight, target)
