"""A layer's attention in native calls, from the norm before it to the residual after it.

It is that of the next tokens of several sequences, whose keys and values go into pages.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from engine.families import fast_path_of
from engine.families.family import FastPath
from engine.families.library import own_forward
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import NativeKernels, out_of_memory
from engine.kernels.native.linear import (
    LatentHeads,
    address_of,
    is_plain,
    is_readable,
    linear_struct,
    read_alike,
    reads_together,
)
from engine.kernels.native.paged_attention import Pieces
from engine.kernels.native.structs import (
    AttentionStruct,
    BlockIndexStruct,
    CompressedAttentionStruct,
    CompressorStruct,
    IndexStruct,
    LatentAttentionStruct,
    MatrixStruct,
    PagesStruct,
)
from engine.runtime.fast_path.angles import Angles, type_of
from engine.runtime.fast_path.norms import LayerNorms, epsilon_of, mixer_of, multiple_of, offset_of

_HALVES, _PAIRS_TO_HALVES, _PAIRS, _NOT = 0, 1, 2, 3
"""Which dimensions are rotated together, and whether they stay where they are, as switchyard_kernels.h numbers it."""


class NoAttention:
    """In place of the attention of a layer that is an MLP alone.

    Attributes: as of `NativeAttention`.
    """

    type = ""
    rotated = address = 0
    has_index = False

    def __init__(self, _layer: Any, kernels: NativeKernels) -> None:
        self.kernels = kernels

    @staticmethod
    def can_step(layer: Any) -> bool:
        """Whether this decoder layer is one."""
        path = fast_path_of(layer, "layer")
        return path is not None and path.of_one_part and mixer_of(layer) is None

    def rows(self, hidden_states: torch.Tensor, *_where: Any) -> torch.Tensor:
        """What it is given."""
        return hidden_states

    def angles_of(self, _positions: Any, _tokens: int) -> Angles | None:
        """None at all."""
        return Angles.none()


class NativeAttention(ABC):
    """The attention of one decoder layer.

    Attributes:
        type: which of the model's angles it rotates by; see `type_of`.
        rotated: dimensions of each head that are.
        address: of its struct.
    """

    type: str
    rotated: int
    address: int
    _index_struct: ctypes.Structure | None = None

    def __init__(self, kernels: NativeKernels, call: Callable[..., int]) -> None:
        self.kernels, self._call = kernels, call

    @property
    def has_index(self) -> bool:
        """Whether an index chooses what tokens attend to."""
        return self._index_struct is not None

    @abstractmethod
    def angles_of(self, positions: Any, tokens: int) -> Angles | None:
        """The angles of so many tokens; `None` if these are others."""

    def rows(self, hidden_states: torch.Tensor, held: PagesStruct, pieces: Pieces, positions: Any) -> torch.Tensor:
        """float32 [1, q, hidden], contiguous, of the next tokens of several sequences, with attention's result added;
        keys and values go into pages.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        angles = self.angles_of(positions, pieces.tokens)
        assert angles is not None
        where = (ctypes.addressof(held), pieces.address_for(held), len(pieces.pieces))
        return self._compute(hidden_states, where, angles)

    def _compute(self, hidden_states: torch.Tensor, where: tuple[int, int, int], angles: Angles) -> torch.Tensor:
        assert hidden_states.dtype == torch.float32
        out = torch.empty_like(hidden_states)
        start = hidden_states.data_ptr()
        if self._call(self.kernels.pool, self.address, *where, start, *angles.arguments, out.data_ptr()):
            raise out_of_memory()
        return out


class GroupedAttention(NativeAttention):
    """Grouped-query attention of the Llama kind; one without a projection of values takes that of keys."""

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        super().__init__(kernels, kernels.attention_step)
        attention = mixer_of(layer)
        path = _fast_path(attention)
        self._struct = attention_struct(layer)
        index = _index_of(attention)
        self._index_struct = _block_index(index) if index is not None else None
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
            and _can_choose_blocks(attention, of_layer, inputs)
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


def _index_of(attention: Any) -> Any:
    """What chooses the blocks of tokens that are attended to; `None` if all are."""
    return getattr(attention, "indexer", None) if _fast_path(attention).indexes else None


def _can_choose_blocks(attention: Any, norms: LayerNorms, inputs: list[Any]) -> bool:
    index = _index_of(attention)
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


def _block_index(index: Any) -> BlockIndexStruct:
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
        _PAIRS if path.rotates_neighbours else _HALVES,
        offset_of(norms.before_attention),
        path.gates_heads,
        None,
        multiple_of(layer),
        getattr(attention, "v_norm", None) is not None,
    )


class LatentAttention(NativeAttention):
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    The library expands the latents of the whole context to keys and values for every token; here the query and the
    mixture of latents go through those matrices instead, which section 2.1.2 calls absorbing them.

    Where an index chooses the tokens that are attended to (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 2), it is
    part of the same call.  A layer may take what the one before it has chosen (GLM-5).
    """

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        super().__init__(kernels, kernels.latent_step)
        self._struct = _latent_struct(layer)
        self._index_struct = _token_index(layer)
        if self._index_struct is not None:
            self._struct.index = ctypes.addressof(self._index_struct)
        self.address = ctypes.addressof(self._struct)
        self.type = type_of(layer.self_attn)
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
            all(is_readable(p) for p in _latent_projections(attention) if p is not None and _heads_of(p) is None)
            and all(is_plain(norm.weight) for norm in _latent_norms(layer) if norm is not None)
            and read_alike(structs)  # the same vector
            and attention.qk_rope_head_dim % 2 == 0
            and _can_choose_tokens(attention)
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


def _can_choose_tokens(attention: Any) -> bool:
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


def _token_index(layer: Any) -> IndexStruct | None:
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


def _latent_projections(attention: Any) -> tuple[Any, ...]:
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


def _latent_norms(layer: Any) -> tuple[Any, ...]:
    """Of the layer, of the query's latent or `None`, of the latent."""
    return layer.input_layernorm, layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm


def _latent_struct(layer: Any) -> LatentAttentionStruct:
    attention = layer.self_attn
    q_a, q, kv_a, kv_b, o = _latent_projections(attention)
    apart = _heads_of(kv_b)
    none = MatrixStruct()
    of_latents = (none, *apart.structs) if apart is not None else (linear_struct(kv_b), none, none)
    norms = _latent_norms(layer)
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


class CompressedAttention:
    """Attention that compresses what lies behind a window (DeepSeek-AI 2026, "DeepSeek-V4", section 2.3): a part of the
    native call of a whole model, between whose layers there are several streams of hidden states.

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
