"""One matrix of every expert of a layer as a multiplication function, plain or tiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import linear

from engine.formats.tiles import Pairing, TiledMatrix, dequantise
from engine.kernels.interface import LayerRecords, QuantisedFormat
from engine.kernels.native.convert import dequantise_natively
from engine.kernels.native.library import NativeKernels

Matrices = Callable[[torch.Tensor, int], torch.Tensor]
"""(x [T, columns], expert) -> [T, rows], bias included."""

_CHUNK_BYTES = 4 * 2**20
"""Weights dequantised at a time: small enough to stay in cache for the product."""

_scratch = threading.local()


def layer_matrices(
    layer: LayerRecords, name: str, biases: Sequence[torch.Tensor] | None, kernels: NativeKernels | None
) -> Matrices:
    """The matrices `name` of a layer; `kernels`, if given, dequantise natively."""
    layout, rows = layer.layout, layer.rows
    if isinstance(layout, QuantisedFormat) and layout.is_tiled(name):
        return TiledMatrices(partial(layout.matrix, rows, name), biases, kernels)
    weights = rows[name]
    if biases is None:
        return lambda x, expert: linear(x, weights[expert])
    return lambda x, expert: linear(x, weights[expert], biases[expert])


class TiledMatrices:
    """Dequantises before multiplying: natively in chunks on the CPU, or with torch operators on any device."""

    def __init__(
        self,
        of_expert: Callable[[int], TiledMatrix],
        biases: Sequence[torch.Tensor] | None,
        kernels: NativeKernels | None,
    ) -> None:
        self._of_expert = of_expert
        self._biases = biases
        self._kernels = kernels

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        matrix = self._of_expert(expert)
        if self._kernels is None or x.device.type != "cpu":
            out = linear(x, dequantise(matrix, x.dtype))
        else:
            out = multiply_in_chunks(x, matrix, self._kernels)
        if self._biases is not None:
            out += self._biases[expert]
        return out


def multiply_in_chunks(x: torch.Tensor, matrix: TiledMatrix, kernels: NativeKernels) -> torch.Tensor:
    """x [T, columns] bf16 -> [T, rows], dequantising some blocks of rows at a time."""
    shape = matrix.shape
    out = x.new_empty(x.shape[0], shape.rows)
    at_once = max(1, _CHUNK_BYTES // (64 * shape.columns))
    buffer = _buffer(min(at_once, shape.blocks) * 32 * shape.columns)
    pairs = shape.rows // 2
    for begin in range(0, shape.blocks, at_once):
        end = min(begin + at_once, shape.blocks)
        if shape.pairing is Pairing.HALVES:
            first, last = begin * 16, min(end * 16, pairs)
            chunk = buffer[: 2 * (last - first) * shape.columns].view(-1, shape.columns)
            dequantise_natively(matrix, begin, end, chunk, kernels)
            gate, up = linear(x, chunk).chunk(2, dim=-1)
            out[:, first:last] = gate
            out[:, pairs + first : pairs + last] = up
        else:
            first, last = begin * 32, min(end * 32, shape.rows)
            chunk = buffer[: (last - first) * shape.columns].view(-1, shape.columns)
            dequantise_natively(matrix, begin, end, chunk, kernels)
            out[:, first:last] = linear(x, chunk)
    return out


def _buffer(numel: int) -> torch.Tensor:
    """A reusable buffer per thread: fresh pages for every chunk would cost as much as filling them."""
    buffer: torch.Tensor | None = getattr(_scratch, "buffer", None)
    if buffer is None or buffer.numel() < numel:
        buffer = _scratch.buffer = torch.empty(numel, dtype=torch.bfloat16)
    return buffer
