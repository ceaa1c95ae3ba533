"""Quantises matrices to tiles: natively if possible, otherwise in torch."""

from __future__ import annotations

import torch

from engine.formats import TiledFormat
from engine.formats.tiles import Pairing, TiledMatrix, TiledShape, quantise_in_torch
from engine.kernels.native.convert import quantise_natively
from engine.kernels.native.library import NativeKernels


def quantise(
    weight: torch.Tensor,
    target_format: TiledFormat,
    pairing: Pairing = Pairing.PLAIN,
    kernels: NativeKernels | None = None,
) -> TiledMatrix:
    """[rows, columns] -> the same in `target_format`, on the same device."""
    rows, columns = weight.shape
    target = TiledMatrix.empty(TiledShape(rows, columns, target_format, pairing), weight.device)
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
