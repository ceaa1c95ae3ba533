"""Experts in as few torch operators as possible: for any device, and without native kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import linear, pad, silu

from engine.formats.tiles import Pairing, TiledMatrix
from engine.kernels.interface import ByGroup, ExpertMath, LayerRecords, Upload
from engine.kernels.native.library import NativeKernels
from engine.kernels.repack import Blocks, Unpack, dequantise_natively, unpack_into, unpacked

Matrices = Callable[[torch.Tensor, int], torch.Tensor]
"""(x [T, columns], expert) -> [T, rows], bias included."""

_CHUNK_BYTES = 4 * 2**20
"""Weights dequantised at a time: small enough to stay in cache for the product."""

_scratch = threading.local()


def layer_matrices(
    layer: LayerRecords,
    name: str,
    biases: Sequence[torch.Tensor] | None,
    kernels: NativeKernels | None,
    unpack: Unpack = unpacked,
) -> Matrices:
    """The matrices `name` of a layer; `kernels`, if given, dequantise natively on the CPU, and `unpack` elsewhere."""
    layout, rows = layer.layout, layer.rows
    if layout.is_tiled(name):
        return TiledMatrices(partial(layout.matrix, rows, name), biases, kernels, unpack)
    if layout.blocks_of(name):
        return BlockMatrices(layer, name, biases, kernels, unpack)
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
        unpack: Unpack = unpacked,
    ) -> None:
        self._of_expert = of_expert
        self._unpack = unpack
        self._biases = biases
        self._kernels = kernels

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        matrix = self._of_expert(expert)
        if self._kernels is None or x.device.type != "cpu":
            out = linear(x, self._unpack(matrix).to(x.dtype))
        else:
            out = multiply_in_chunks(x, matrix, self._kernels)
        if self._biases is not None:
            out += self._biases[expert]
        return out


class BlockMatrices:
    """Unpacks rows of blocks before multiplying."""

    def __init__(
        self,
        layer: LayerRecords,
        name: str,
        biases: Sequence[torch.Tensor] | None,
        kernels: NativeKernels | None,
        unpack: Unpack,
    ) -> None:
        self._unpack = unpack
        self._parts = [(layer.rows[own], kind) for own, kind in layer.layout.blocks_of(name)]
        self._biases, self._kernels = biases, kernels
        self._alternates = layer.layout.alternates and name != "down_proj"

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        products = []
        for rows, kind in self._parts:
            blocks = Blocks(kind, rows[expert])
            if x.device.type == "cpu" and self._kernels is not None:
                weight = torch.empty(blocks.rows, blocks.columns, dtype=torch.bfloat16)
                unpack_into(blocks, weight, self._kernels)
            else:
                weight = self._unpack(blocks)
            products.append(linear(x, weight.to(x.dtype)))
        out = torch.cat(products, -1)
        if self._biases is not None:
            out += self._biases[expert]
        return out.view(*out.shape[:-1], 2, -1).mT.flatten(-2) if self._alternates else out


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


_ROWS_TOGETHER = 16
"""Rows of a product are padded to a multiple: creating a kernel per count costs more than the padding."""
_ALL_AT_ONCE_BYTES = 16 * 2**20
"""Up to this layer size, reading unused experts costs less than a loop over the used ones."""


class TorchExperts:
    """Computes one layer's experts; dequantises quantised ones, natively if `kernels` are given.

    One token: if nearly all experts of a small layer are used, all in two batched products, the unused ones with weight
    0; otherwise a pair of products per used expert, sharing the other operators. Several tokens: grouped by expert, a
    pair of products each, summed in fp32 in expert order.
    """

    def __init__(
        self,
        layer: LayerRecords,
        math: ExpertMath,
        kernels: NativeKernels | None = None,
        unpack: Unpack = unpacked,
    ) -> None:
        self.math = math
        self._experts = layer.num_experts
        self._first_bias = layer.rows[math.first_bias] if math.first_bias else None
        self._down_bias = layer.rows[math.down_bias] if math.down_bias else None
        self._first = layer_matrices(layer, math.first, self._first_bias, kernels, unpack)
        self._down = layer_matrices(layer, "down_proj", self._down_bias, kernels, unpack)
        self._first_all: torch.Tensor | None = None
        self._down_all: torch.Tensor | None = None
        self._first_bias_all: torch.Tensor | None = None
        self._down_bias_all: torch.Tensor | None = None
        if layer.device.type != "cpu":  # where every row must give the same however many come with it
            self.fewest_in_groups = 2
        quantised = layer.layout.plain is not None
        self._dtype = torch.bfloat16 if quantised else layer.rows["down_proj"][0].dtype
        in_one_piece = len(layer.pieces) == 1 and layer.pieces[0].nbytes <= _ALL_AT_ONCE_BYTES
        # One expert alone must give the same result as among several, whatever the number of cache slots.
        if in_one_piece and self._experts > 1 and not quantised and layer.device.type == "cpu":
            # Decoding reuses the same buffers, which saves an allocation per operator.
            first, down = layer.stacked[math.first], layer.stacked["down_proj"]
            self._gates = torch.empty(self._experts, 1, first.shape[1], dtype=self._dtype)
            self._outs = torch.empty(self._experts, 1, down.shape[1], dtype=self._dtype)
            self._first_all, self._down_all = first.mT, down.mT
            if math.first_bias and math.down_bias:
                self._first_bias_all = layer.stacked[math.first_bias][:, None]
                self._down_bias_all = layer.stacked[math.down_bias][:, None]

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        hidden = hidden_states if hidden_states.dtype == self._dtype else hidden_states.to(self._dtype)
        if hidden.shape[0] == 1:
            if self._first_all is not None and 4 * top_k_index.shape[1] >= 3 * self._experts:
                result = self._one_token_all_experts(hidden, top_k_index, top_k_weights)
            else:
                result = self._one_token(hidden, top_k_index, top_k_weights)
        else:
            result = self._many_tokens(hidden, top_k_index, top_k_weights)
        return result if result.dtype == hidden_states.dtype else result.to(hidden_states.dtype)

    def for_groups(self, experts: Sequence[int], counts: Sequence[int], upload: Upload) -> ByGroup:  # noqa: ARG002
        lengths = list(counts)

        def compute(rows: torch.Tensor) -> torch.Tensor:
            parts = torch.split(rows.to(self._dtype), lengths)
            inner = torch.cat([self._first(part, expert) for part, expert in zip(parts, experts, strict=True)])
            parts = torch.split(self._gate(inner), lengths)
            out = torch.cat([self._down(part, expert) for part, expert in zip(parts, experts, strict=True)])
            if self.math.norm is not None:
                out = self.math.norm(out)
            return out.to(rows.dtype)

        return compute

    def _gate(self, inner: torch.Tensor) -> torch.Tensor:
        if self.math.is_silu_gate:
            gate, up = inner.chunk(2, dim=-1)
            return silu(gate).mul_(up)
        return self.math.gate(inner)

    def _one_token_all_experts(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert self._first_all is not None
        assert self._down_all is not None
        experts = self._experts
        inner = torch.bmm(hidden.expand(experts, 1, -1), self._first_all, out=self._gates)
        if self._first_bias_all is not None:
            inner += self._first_bias_all
        out = torch.bmm(self._gate(inner), self._down_all, out=self._outs)
        if self._down_bias_all is not None:
            out += self._down_bias_all
        out = out.view(experts, -1)
        if self.math.norm is not None:
            out = self.math.norm(out)
        # An extra column takes invalid ids.
        share = torch.zeros(1, experts + 1, dtype=torch.float32, device=weights.device)
        share.scatter_add_(1, index.clamp(max=experts), weights.float())
        return share[:, :experts] @ out.float()

    def _one_token(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen = index[0].tolist()
        if max(chosen) >= self._experts:
            keep = [place for place, expert in enumerate(chosen) if expert < self._experts]
            chosen, weights = [chosen[place] for place in keep], weights[:, keep]
            if not chosen:
                return torch.zeros_like(hidden)
        inner = self._gate(torch.cat([self._first(hidden, expert) for expert in chosen]))
        rows = inner[:, None].unbind(0)
        out = torch.cat([self._down(row, expert) for row, expert in zip(rows, chosen, strict=True)])
        if self.math.norm is not None:
            out = self.math.norm(out)
        return weights.float() @ out.float()

    def _many_tokens(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        width = index.shape[1]
        flat = index.reshape(-1)
        order = flat.argsort(stable=True)
        # Only those that occur: few tokens use few of many experts or slots.
        occurring, counts = flat[order].unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        tokens = order // width
        shares = weights.reshape(-1)[order].float()[:, None]
        result = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        begin = 0
        for expert, count in zip(occurring.tolist(), counts.tolist(), strict=True):
            if expert >= self._experts:
                break
            end = begin + count
            mine = tokens[begin:end]
            taken = pad(mine, (0, -count % _ROWS_TOGETHER)) if count > 1 else mine
            out = self._down(self._gate(self._first(hidden[taken], expert)), expert)[:count]
            if self.math.norm is not None:
                out = self.math.norm(out)
            result.index_add_(0, mine, out.float().mul_(shares[begin:end]))
            begin = end
        return result
