"""Grouped-query attention of a few tokens in one native call, from the norm before it to the residual after it."""

from __future__ import annotations

import ctypes
from typing import Any

from engine.families import fast_path_of
from engine.families.family import FastPath
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import address_of, is_plain, is_readable, linear_struct, read_alike, reads_together
from engine.kernels.native.structs import AttentionStruct, BlockIndexStruct, MatrixStruct
from engine.runtime.fast_path.angles import Angles, type_of
from engine.runtime.fast_path.native_attention import NativeAttention
from engine.runtime.fast_path.norms import LayerNorms, epsilon_of, mixer_of, multiple_of, offset_of

_HALVES, _NEIGHBOURS = 0, 2
"""Which dimensions are rotated together, as switchyard_kernels.h numbers it."""


class GroupedAttention(NativeAttention):
    """Of the Llama kind; one without a projection of values takes that of keys."""

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        super().__init__(kernels, kernels.attention_step)
        attention = mixer_of(layer)
        path = _fast_path(attention)
        self._struct = attention_struct(layer)
        index = _index(attention)
        self._index_struct = _index_struct(index) if index is not None else None
        if self._index_struct is not None:
            self._struct.index = ctypes.addressof(self._index_struct)
        self.type = type_of(attention)
        self.address = ctypes.addressof(self._struct)
        self._head_dim: int = attention.head_dim
        self.rotated: int = self._struct.rotated
        self._angles = self.rotated // (2 if path.angles == "once" else 1)

    @staticmethod
    def can_step(layer: Any) -> bool:
        """Whether the attention of this decoder layer is of a kind that this computes."""
        attention = mixer_of(layer)
        path = fast_path_of(attention, "attention")
        if (
            path is None
            or path.is_latent
            or path.compresses
            or any(getattr(attention.config, name, None) for name in path.unless)
            or not getattr(attention, "is_causal", True)
        ):
            return False
        of_layer = LayerNorms.of(layer)
        first = of_layer.before_attention
        norms = [norm for norm in (*_head_norms(attention), of_layer.after_attention) if norm is not None]
        projections = [projection for projection in _projections(attention) if projection is not None]
        inputs = [linear_struct(projection) for projection in projections[:-1]]
        return (
            read_alike(inputs)  # the same vector
            and all(map(is_readable, projections))
            and all(is_plain(norm.weight) for norm in (*norms, first))
            and all(epsilon_of(norm) == epsilon_of(first) for norm in norms)
            and (getattr(attention, "sinks", None) is None or is_plain(attention.sinks))
            and _rotated(attention) % 2 == 0
            and _can_look_up(attention, of_layer, inputs)
        )

    def angles_of(self, positions: Any, tokens: int) -> Angles | None:
        """The cosines and sines of so many tokens; `None` if they are of another number."""
        if positions is None and not self.rotated:
            return Angles.none()
        cos, sin = positions
        if self._angles and cos.numel() != tokens * self._angles:
            return None
        return Angles.of(cos, sin)


def _fast_path(attention: Any) -> FastPath:
    path = fast_path_of(attention, "attention")
    assert path is not None
    return path


def _projections(attention: Any) -> tuple[Any, ...]:
    return attention.q_proj, attention.k_proj, attention.v_proj, getattr(attention, _fast_path(attention).output)


def _head_norms(attention: Any) -> tuple[Any, ...]:
    return tuple(getattr(attention, name, None) for name in _fast_path(attention).head_norms)


def _rotated(attention: Any) -> int:
    """How many dimensions of a head are."""
    path = _fast_path(attention)
    if path.rotates is not None and not path.rotates(attention):
        return 0
    rope = getattr(attention.config, "rope_parameters", None) or {}
    if path.angles_by_type:
        rope = rope[type_of(attention)]
    if rope.get("rope_type") == "proportional":  # the others by an angle of 0
        return int(attention.head_dim)
    return int(attention.head_dim * rope.get("partial_rotary_factor", 1.0))


def _index(attention: Any) -> Any:
    """What chooses the blocks of tokens that are attended to; `None` if all are."""
    return getattr(attention, "indexer", None) if _fast_path(attention).indexes else None


def _can_look_up(attention: Any, norms: LayerNorms, inputs: list[Any]) -> bool:
    index = _index(attention)
    if index is None:
        return True
    mine = [linear_struct(p) for p in (index.q_proj, index.k_proj)]
    epsilon = epsilon_of(norms.before_attention)
    return (
        all(p.bias is None and is_readable(p) for p in (index.q_proj, index.k_proj))
        and reads_together([*inputs, *mine])
        and all(is_plain(norm.weight) and epsilon_of(norm) == epsilon for norm in (index.q_norm, index.k_norm))
        and index.num_heads == attention.config.num_key_value_heads
        and index.head_dim >= _rotated(attention)
        and index.block_size % 32 == 0
        and 1 <= index.local_blocks <= index.topk_blocks
    )


def _index_struct(index: Any) -> BlockIndexStruct:
    return BlockIndexStruct(
        linear_struct(index.q_proj),
        linear_struct(index.k_proj),
        index.q_norm.weight.data_ptr(),
        index.k_norm.weight.data_ptr(),
        index.head_dim,
        index.block_size,
        index.topk_blocks,
        index.local_blocks,
    )


def attention_struct(layer: Any) -> AttentionStruct:
    """The weights of a decoder layer's attention, of a kind that `GroupedAttention` knows; it points into them."""
    attention = mixer_of(layer)
    path, norms = _fast_path(attention), LayerNorms.of(layer)
    projections = _projections(attention)
    return AttentionStruct(
        norms.before_attention.weight.data_ptr(),
        *(norm.weight.data_ptr() if norm is not None else None for norm in _head_norms(attention)),
        *(address_of(p.bias) if p is not None else None for p in projections),
        address_of(getattr(attention, "sinks", None)),
        address_of(norms.after_attention.weight) if norms.after_attention is not None else None,
        *(linear_struct(p) if p is not None else MatrixStruct() for p in projections),
        epsilon_of(norms.before_attention),
        attention.scaling,
        attention.q_proj.in_features,
        attention.q_proj.out_features // attention.head_dim // (2 if path.gates_heads else 1),
        attention.k_proj.out_features // attention.head_dim,
        attention.head_dim,
        path.norms_all_heads,
        path.head_norms_last,
        _rotated(attention),
        _NEIGHBOURS if path.rotates_neighbours else _HALVES,
        offset_of(norms.before_attention),
        path.gates_heads,
        None,
        multiple_of(layer),
        getattr(attention, "v_norm", None) is not None,
    )
