"""Decoder layers of many rows by native kernels: linear layers of every family, whole attention layers of some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns
from typing import Any

import torch

from engine.experts.dispatch import experts_forward
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import Pieces
from engine.kernels.native.rows import RowsLinear, attention_rows, route_rows
from engine.kernels.native.structs import SparseBlockStruct
from engine.runtime.batch.layers import DecoderLayers, Recording
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.fast_path.grouped_attention import GroupedAttention, attention_struct
from engine.runtime.fast_path.sparse_block import SparseBlock
from engine.runtime.native_decoder import knows_layer
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

_FEWEST_WEIGHTS = 64 * 1024
"""Below this torch is as fast; and routers are left to the library, where a rounding changes the choice."""


class NativeRows:
    """What the kernels compute of a model's layers.

    Args:
        states: the pages of its attention modules, which have all been met.
    """

    def __init__(self, model: Any, layers: DecoderLayers, states: PagedStates, kernels: NativeKernels) -> None:
        self._layers, self._states, self._kernels = layers, states, kernels
        self._attention = {
            index: attention_struct(layers[index])
            for index in range(len(layers))
            if knows_layer(layers[index]) and GroupedAttention.can_step(layers[index])
        }
        blocks = {index: SparseBlock.of(layers[index], kernels) for index in self._attention}
        self._sparse = {index: block for index, block in blocks.items() if block is not None}
        self._linears = [_linears(layers[index], kernels) for index in range(len(layers))]
        head = model.get_output_embeddings()
        self._head = _linears(head, kernels) if head is not None else []

    def run(self, index: int, hidden: torch.Tensor, recording: Recording, pieces: Pieces) -> torch.Tensor:
        """What a layer makes of hidden states [1, T, H]."""
        with _replaced(self._linears[index]):
            struct = self._attention.get(index)
            if struct is None or hidden.dtype != torch.bfloat16:
                return self._layers.run(index, hidden, recording)
            layer = self._layers[index]
            cos, sin = recording.calls[index][1]["position_embeddings"]
            paged = self._states.layer_of(layer.self_attn)[1]
            begun_ns = perf_counter_ns()
            out = attention_rows(self._kernels, struct, paged, pieces, hidden[0], cos[0], sin[0])[None]
            if RECORDER.on:
                RECORDER.layer, RECORDER.layer_since_ns = index, perf_counter_ns()
                RECORDER.dense(lanes.ATTENTION, begun_ns, RECORDER.layer_since_ns, index)
            sparse = self._sparse.get(index)
            if sparse is not None:
                return self._add_experts(layer.mlp, sparse.struct, out[0])[None]
            result = layer.mlp(layer.post_attention_layernorm(out))
            return torch.add(out, result[0] if isinstance(result, tuple) else result)

    def linears(self, layers: Iterable[int]) -> AbstractContextManager[None]:
        """While in it, these layers' linear layers are computed by the kernels, whoever calls the layers."""
        return _replaced([pair for index in layers for pair in self._linears[index]])

    def _add_experts(self, block: Any, struct: SparseBlockStruct, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] with what a sparse block makes of them added."""
        normed, chosen, shares = route_rows(self._kernels, struct, hidden)
        mixed = experts_forward(block.experts, normed, chosen, shares)
        shared = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
        if shared is not None:
            of_all = shared(normed)
            gate = getattr(block, "shared_expert_gate", None)
            mixed = mixed + (of_all if gate is None else torch.sigmoid(gate(normed)) * of_all)
        return hidden + mixed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, R, H] behind the last layer -> [R, V]."""
        with _replaced(self._head):
            return self._layers.logits(hidden)


def _linears(part: Any, kernels: NativeKernels) -> list[tuple[Any, RowsLinear]]:
    return [
        (module, RowsLinear(module, kernels))
        for module in part.modules()
        if RowsLinear.can(module) and module.in_features * module.out_features >= _FEWEST_WEIGHTS
    ]


@contextmanager
def _replaced(linears: list[tuple[Any, RowsLinear]]) -> Iterator[None]:
    """Between two layers the model's own ways are back: somebody else may use it then."""
    own = [module.__dict__.get("forward") for module, _ in linears]
    for module, forward in linears:
        module.forward = forward
    try:
        yield
    finally:
        for (module, _), forward in zip(linears, own, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward
