"""Attention that compresses what lies behind a window (DeepSeek-AI 2026, "DeepSeek-V4", section 2.3), over pages.

It is a part of the native call of a whole model, between whose layers there are several streams of hidden states.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from engine.families import fast_path_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import is_readable, linear_struct, reads_together
from engine.kernels.native.structs import CompressedAttentionStruct, CompressorStruct, MatrixStruct
from engine.runtime.fast_path.angles import Angles, type_of


class CompressedAttention:
    """Of the DeepSeek-V4 kind.

    Attributes: as of `NativeAttention`.
    """

    has_index = False
    """None of which the library's cache layers know by themselves."""

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        self.kernels = kernels
        attention = layer.self_attn
        self.type = type_of(attention)
        self.rotated: int = attention.config.qk_rope_head_dim
        self._held = list[Any]()
        self._struct = self._described(layer)
        self.address = ctypes.addressof(self._struct)

    @staticmethod
    def can_step(layer: Any) -> bool:
        """Whether the attention of this decoder layer is of a kind that this computes."""
        attention: Any = getattr(layer, "self_attn", None)
        path = fast_path_of(attention, "attention")
        if path is None or not path.compresses:
            return False
        firsts, queries, outputs = _linears(attention)
        return (
            all(each.bias is None and is_readable(each) for each in (*firsts, *queries, *outputs))
            and reads_together(map(linear_struct, firsts))
            and reads_together(map(linear_struct, queries))
            and attention.config.qk_rope_head_dim % 2 == 0
            and attention.num_heads % attention.config.o_groups == 0
        )

    def angles_of(self, positions: Any, tokens: int) -> Angles | None:
        """The cosines and sines of so many tokens; `None` if they are of another number."""
        cos, sin = positions
        return Angles.of(cos, sin) if 2 * cos.numel() == tokens * self.rotated else None

    def _described(self, layer: Any) -> CompressedAttentionStruct:
        attention, norm = layer.self_attn, layer.input_layernorm
        config, compressor = attention.config, attention.compressor
        index = getattr(compressor, "indexer", None)
        struct = CompressedAttentionStruct(
            *map(linear_struct, (attention.q_a_proj, attention.q_b_proj, attention.kv_proj)),
            *map(linear_struct, (attention.o_a_proj, attention.o_b_proj)),
            *map(_matrix, (index, index and index.scorer), ("q_b_proj", "weights_proj")),
            *(self._floats(each.weight) for each in (norm, attention.q_a_norm, attention.kv_norm)),
            self._floats(attention.sinks),
            epsilon=norm.variance_epsilon,
            scale=attention.scaling,
            hidden=norm.weight.numel(),
            heads=attention.num_heads,
            head_dim=attention.head_dim,
            rope=config.qk_rope_head_dim,
            groups=config.o_groups,
        )
        if compressor is not None:
            rotary, kind = compressor.rotary_emb, compressor.rope_layer_type
            struct.frequencies = self._floats(getattr(rotary, f"{kind}_inv_freq"))
            struct.angle_scale = getattr(rotary, f"{kind}_attention_scaling")
            struct.rate, struct.compressor = compressor.compress_rate, self._compressor(compressor)
        if index is not None:
            struct.index, struct.index_heads, struct.most = self._compressor(index), index.num_heads, index.index_topk
            struct.index_scale = index.scorer.softmax_scale * index.scorer.weights_scaling
        return struct

    def _compressor(self, compressor: Any) -> int:
        struct = CompressorStruct(
            linear_struct(compressor.kv_proj),
            linear_struct(compressor.gate_proj),
            self._floats(compressor.position_bias),
            self._floats(compressor.kv_norm.weight),
            compressor.head_dim,
        )
        self._held.append(struct)
        return ctypes.addressof(struct)

    def _floats(self, tensor: torch.Tensor) -> int:
        """Where a copy is, or the tensor itself."""
        held = tensor.detach().float().contiguous()
        self._held.append(held)
        return held.data_ptr()


def _matrix(holder: Any, name: str) -> MatrixStruct:
    return linear_struct(getattr(holder, name)) or MatrixStruct() if holder is not None else MatrixStruct()


def _linears(attention: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Those of hidden states, those of what makes queries, and those of what heads give."""
    firsts, queries = [attention.q_a_proj, attention.kv_proj], [attention.q_b_proj]
    compressor = attention.compressor
    if compressor is not None:
        firsts += [compressor.kv_proj, compressor.gate_proj]
    if (index := getattr(compressor, "indexer", None)) is not None:
        firsts += [index.kv_proj, index.gate_proj, index.scorer.weights_proj]
        queries.append(index.q_b_proj)
    return firsts, queries, [attention.o_a_proj, attention.o_b_proj]
