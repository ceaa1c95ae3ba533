"""Multi-head latent attention of a few tokens in one native call (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

The library expands the latents of the whole context to keys and values for every token; here the query and the mixture
of latents go through those matrices instead, which section 2.1.2 calls absorbing them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from engine.families import fast_path_of
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import address_of, is_plain, is_readable, linear_struct, out_of_memory, read_alike
from engine.kernels.native.structs import LatentAttentionStruct, MatrixStruct
from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer

_HALVES, _PAIRS_TO_HALVES, _PAIRS = 0, 1, 2


class LatentAttention:
    """The attention of one decoder layer."""

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        self._struct = _struct(layer)
        self.address = ctypes.addressof(self._struct)
        self._kernels = kernels
        self._index: int = layer.self_attn.layer_idx
        self._rope: int = layer.self_attn.qk_rope_head_dim
        self._angles = torch.empty(0)
        self._arguments: tuple[int, int, int, int] = (0, 0, 0, 0)

    @staticmethod
    def can_step(layer: Any) -> bool:
        """Whether the attention of this decoder layer is of a kind that this computes."""
        attention = layer.self_attn
        path = fast_path_of(attention, "attention")
        if path is None or not path.is_latent:
            return False
        structs = [linear_struct(p) for p in (_first_of_query(attention), attention.kv_a_proj_with_mqa)]
        return (
            all(is_readable(p) for p in _projections(attention) if p is not None)
            and all(is_plain(norm.weight) for norm in _norms(layer) if norm is not None)
            and read_alike(structs)  # the same vector
            and attention.qk_rope_head_dim % 2 == 0
        )

    def step(self, hidden_states: torch.Tensor, cache: Any, positions: Any) -> torch.Tensor | None:
        """hidden_states [1, q, hidden], contiguous, with attention's result added; `None` if this is not for it.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        held_layer, tokens = cache.layers[self._index], hidden_states.shape[1]
        if type(held_layer) not in (GrowingLayer, GrowingWindowLayer) or not self._take_angles(positions, tokens):
            return None
        rows = held_layer.claim_rows(tokens)
        if rows is None:
            return None
        latents, rotary_keys, held = rows
        out = torch.empty_like(hidden_states)
        kernels = self._kernels
        failed = kernels.latent_step(
            kernels.pool,
            self.address,
            tokens,
            hidden_states.data_ptr(),
            *self._arguments,
            latents.data_ptr(),
            rotary_keys.data_ptr(),
            held,
            out.data_ptr(),
        )
        if failed:
            raise out_of_memory()
        return out

    def _take_angles(self, positions: Any, tokens: int) -> bool:
        """Puts cosines and sines of `positions` where the kernel reads them; whether they are of the kind it knows."""
        if self._struct.rotation == _PAIRS:
            if positions.numel() != tokens * self._rope // 2 or positions.dtype != torch.complex64:
                return False
            self._angles = positions.contiguous()
            start = self._angles.data_ptr()
            self._arguments = (start, start + 4, 2, self._rope)
            return True
        cos, sin = positions
        if cos.numel() != tokens * self._rope or cos.dtype != torch.bfloat16:
            return False
        self._angles = torch.cat((cos, sin), dim=-1).float()
        start = self._angles.data_ptr()
        self._arguments = (start, start + 4 * self._rope, 1, 2 * self._rope)
        return True


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


def _norms(layer: Any) -> tuple[Any, ...]:
    """Of the layer, of the query's latent or `None`, of the latent."""
    return layer.input_layernorm, layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm


def _struct(layer: Any) -> LatentAttentionStruct:
    attention = layer.self_attn
    q_a, _, kv_a, _, o = projections = _projections(attention)
    norms = _norms(layer)
    path = fast_path_of(attention, "attention")
    assert path is not None
    rotation = _PAIRS
    if path.angles == "twice":
        rotation = _PAIRS_TO_HALVES if attention.config.rope_interleave else _HALVES
    return LatentAttentionStruct(
        *(address_of(norm.weight) if norm is not None else None for norm in norms),
        *(address_of(p.bias) if p is not None else None for p in (q_a, kv_a, o)),
        *(linear_struct(p) if p is not None else MatrixStruct() for p in projections),
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
