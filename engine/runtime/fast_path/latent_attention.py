"""Multi-head latent attention of a few tokens in one native call (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

The library expands the latents of the whole context to keys and values for every token; here the query and the mixture
of latents go through those matrices instead, which section 2.1.2 calls absorbing them.

Where an index chooses the tokens that are attended to (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 2), it is part of
the same call.  A layer may take what the one before it has chosen (GLM-5).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from engine.families import fast_path_of
from engine.families.library import own_forward
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import (
    LatentHeads,
    address_of,
    is_plain,
    is_readable,
    linear_struct,
    read_alike,
    reads_together,
)
from engine.kernels.native.paged_attention import KvType
from engine.kernels.native.structs import IndexStruct, LatentAttentionStruct, MatrixStruct
from engine.runtime.fast_path.angles import Angles, type_of
from engine.runtime.fast_path.native_attention import NativeAttention

_BF16 = int(KvType.BF16)
_HALVES, _PAIRS_TO_HALVES, _PAIRS, _NOT = 0, 1, 2, 3


class LatentAttention(NativeAttention):
    """Of the DeepSeek kind."""

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        super().__init__(kernels, kernels.latent_step)
        self._struct = _struct(layer)
        self._index_struct = _index_struct(layer)
        if self._index_struct is not None:
            self._struct.index = ctypes.addressof(self._index_struct)
        self.address = ctypes.addressof(self._struct)
        self.type = type_of(layer.self_attn)
        self._index: int = layer.self_attn.layer_idx
        is_rotated = self._struct.rotation != _NOT
        self.rotated: int = layer.self_attn.qk_rope_head_dim if is_rotated else 0

    @staticmethod
    def can_step(layer: Any) -> bool:
        """Whether the attention of this decoder layer is of a kind that this computes."""
        attention: Any = getattr(layer, "self_attn", None)
        path = fast_path_of(attention, "attention")
        if path is None or not path.is_latent:
            return False
        structs = [linear_struct(p) for p in (_first_of_query(attention), attention.kv_a_proj_with_mqa)]
        return (
            all(is_readable(p) for p in _projections(attention) if p is not None and _heads_of(p) is None)
            and all(is_plain(norm.weight) for norm in _norms(layer) if norm is not None)
            and read_alike(structs)  # the same vector
            and attention.qk_rope_head_dim % 2 == 0
            and _can_look_up(attention)
        )

    def angles_of(self, positions: Any, tokens: int) -> Angles | None:
        """The angles of so many tokens; `None` if they are not of the kind that the kernel knows."""
        if not self.rotated:
            return Angles.none()
        if self._struct.rotation == _PAIRS:
            if positions.numel() != tokens * self.rotated // 2 or positions.dtype != torch.complex64:
                return None
            return Angles.of_complex(positions)
        cos, sin = positions
        return Angles.of(cos, sin) if cos.numel() == tokens * self.rotated else None


def _can_look_up(attention: Any) -> bool:
    """Whether the index of an attention module, if it has one, is of the kind that this computes."""
    path = fast_path_of(attention, "attention")
    assert path is not None
    index = getattr(attention, "indexer", None)
    if not path.indexes or index is None:
        return True
    linears = (index.wq_b, index.wk, index.weights_proj)
    q, k, weights = map(linear_struct, linears)
    first, kv_a, queries = map(linear_struct, (attention.q_a_proj, attention.kv_a_proj_with_mqa, attention.q_b_proj))
    return (
        all(p.bias is None and is_readable(p) for p in linears)
        and reads_together((first, kv_a, k, weights))
        and reads_together((queries, q))
        and is_plain(index.k_norm.weight)
        and is_plain(index.k_norm.bias)
        and index.head_dim % 2 == 0
        and index.qk_rope_head_dim == attention.qk_rope_head_dim <= index.head_dim
    )


_chosen: dict[int, torch.Tensor] = {}
"""Where tokens that were chosen are told to layers without an index of their own, by how many there may be: these
follow in the same step."""


def _chosen_by(most: int) -> torch.Tensor:
    if most not in _chosen:
        _chosen[most] = torch.zeros(MAX_TOKENS, most, dtype=torch.int32)
    return _chosen[most]


def _index_struct(layer: Any) -> IndexStruct | None:
    attention = layer.self_attn
    path = fast_path_of(attention, "attention")
    assert path is not None
    if not path.indexes:
        return None
    index, most = getattr(attention, "indexer", None), attention.config.index_topk
    struct = IndexStruct(chosen=_chosen_by(most).data_ptr(), most=most)
    if index is not None:
        struct.q, struct.k, struct.weights = map(linear_struct, (index.wq_b, index.wk, index.weights_proj))
        struct.k_norm, struct.k_bias = index.k_norm.weight.data_ptr(), index.k_norm.bias.data_ptr()
        struct.epsilon, struct.scale = index.k_norm.eps, (index.head_dim * index.n_heads) ** -0.5
        struct.heads, struct.dim = index.n_heads, index.head_dim
        struct.rotation = _PAIRS_TO_HALVES if path.indexes == "neighbours" else _HALVES
    return struct


def _first_of_query(attention: Any) -> Any:
    return attention.q_proj if attention.q_lora_rank is None else attention.q_a_proj


def _projections(attention: Any) -> tuple[Any, ...]:
    """q_a or `None`, q, kv_a, kv_b, o."""
    latent = attention.q_lora_rank is not None
    return (
        attention.q_a_proj if latent else None,
        attention.q_b_proj if latent else attention.q_proj,
        attention.kv_a_proj_with_mqa,
        attention.kv_b_proj,
        attention.o_proj,
    )


def _heads_of(projection: Any) -> LatentHeads | None:
    """What makes keys and values of latents, if a file has both apart."""
    forward = own_forward(projection)
    return forward if isinstance(forward, LatentHeads) else None


def _norms(layer: Any) -> tuple[Any, ...]:
    """Of the layer, of the query's latent or `None`, of the latent."""
    return layer.input_layernorm, layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm


def _struct(layer: Any) -> LatentAttentionStruct:
    attention = layer.self_attn
    q_a, q, kv_a, kv_b, o = _projections(attention)
    apart = _heads_of(kv_b)
    none = MatrixStruct()
    of_latents = (none, *apart.structs) if apart is not None else (linear_struct(kv_b), none, none)
    norms = _norms(layer)
    path = fast_path_of(attention, "attention")
    assert path is not None
    rotation = _NOT if path.angles == "none" else _PAIRS
    if path.angles == "twice":
        rotation = _PAIRS_TO_HALVES if getattr(attention.config, "rope_interleave", True) else _HALVES
    return LatentAttentionStruct(
        *(address_of(norm.weight) if norm is not None else None for norm in norms),
        *(address_of(p.bias) if p is not None else None for p in (q_a, kv_a, o)),
        *(linear_struct(p) if p is not None else MatrixStruct() for p in (q_a, q, kv_a)),
        *of_latents,
        linear_struct(o),
        *(norm.variance_epsilon if norm is not None else 0.0 for norm in norms),
        attention.scaling,
        layer.input_layernorm.weight.numel(),
        attention.num_heads,
        attention.qk_nope_head_dim,
        attention.qk_rope_head_dim,
        attention.kv_lora_rank,
        attention.v_head_dim,
        rotation,
    )
