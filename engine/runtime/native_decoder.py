"""Decoder layers of the Llama and Mixtral kind, one token at a time, in two native calls each.

The library's own modules stay what they are and compute everything else: prompts, beams, other caches, other types.
Only the step of a single token through layers whose mathematics the kernels know takes the short way, and the parity
tests hold it to the library's result.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from transformers.models.llama import modeling_llama as llama
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from engine.errors import EngineError, ErrorCode
from engine.kernels.native.experts import NativeExperts
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.linear import linear_struct
from engine.kernels.native.structs import AttentionStruct, SparseBlockStruct
from engine.runtime.growing_cache import GrowingLayer

_LAYERS = (
    llama.LlamaDecoderLayer,
    mixtral.MixtralDecoderLayer,
    qwen3.Qwen3DecoderLayer,
    qwen3_moe.Qwen3MoeDecoderLayer,
)
_SPARSE_BLOCKS = (mixtral.MixtralSparseMoeBlock, qwen3_moe.Qwen3MoeSparseMoeBlock)


def speed_up_decoder_layers(model: Any, kernels: NativeKernels) -> int:
    """Gives every decoder layer that the kernels know its short way for single tokens; returns how many."""
    count = 0
    for layer in model.modules():
        if type(layer) in _LAYERS and _is_known_attention(layer):
            layer.forward = _SingleTokenLayer(layer, kernels)
            count += 1
    return count


def route_in_library(model: Any) -> None:
    """Lets the library's own routers choose the experts again, in all layers, for somebody who listens to them."""
    for layer in model.modules():
        short_way = layer.__dict__.get("forward")
        if isinstance(short_way, _SingleTokenLayer):
            short_way.leave_routing()


def _is_known_attention(layer: Any) -> bool:
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    return (
        all(p.bias is None and linear_struct(p) is not None for p in projections)
        and all(norm is None or _is_plain(norm.weight) for norm in norms)
        and _is_plain(layer.input_layernorm.weight)
        and _is_plain(layer.post_attention_layernorm.weight)
        and attention.head_dim % 2 == 0
        and (norms[0] is None or norms[0].variance_epsilon == layer.input_layernorm.variance_epsilon)
    )


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous()


class _SingleTokenLayer:
    """The `forward` of one decoder layer."""

    def __init__(self, layer: Any, kernels: NativeKernels) -> None:
        # Bound before it is replaced: the way for everything that is not a single token.
        self._library_forward = layer.forward
        self._layer = layer
        self._kernels = kernels
        self._index: int = layer.self_attn.layer_idx
        self._attention = _attention_struct(layer)
        self._attention_address = ctypes.addressof(self._attention)
        self._sparse = _sparse_struct(layer)
        if self._sparse is not None:
            self._sparse_address = ctypes.addressof(self._sparse)
            self._chosen = torch.zeros(self._sparse.top_k, dtype=torch.int64)
            self._shares = torch.zeros(self._sparse.top_k)
            self._chosen_address, self._shares_address = self._chosen.data_ptr(), self._shares.data_ptr()

    def leave_routing(self) -> None:
        """From now on only attention goes the short way."""
        self._sparse = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        row = None
        cache: Any = kwargs.get("past_key_values")
        positions: Any = kwargs.get("position_embeddings")
        if (
            hidden_states.numel() == self._attention.hidden
            and hidden_states.dtype == torch.bfloat16
            and cache is not None
            and positions is not None
            and positions[0].numel() == self._attention.head_dim  # rotary embedding of the whole head
            and positions[0].dtype == torch.bfloat16
            and kwargs.get("attention_mask") is None
        ):
            cache_layer = cache.layers[self._index]
            if type(cache_layer) is GrowingLayer:
                row = cache_layer.claim_row()
        if row is None:
            return self._library_forward(hidden_states, *args, **kwargs)
        keys, values, held = row
        cos, sin = positions
        hidden_states = hidden_states.contiguous()
        out = torch.empty_like(hidden_states)
        kernels = self._kernels
        failed = kernels.attention_step(
            kernels.pool,
            self._attention_address,
            hidden_states.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.shape[-2],
            held,
            out.data_ptr(),
        )
        if failed:
            raise _out_of_memory()
        if self._sparse is None:
            return out + self._layer.mlp(self._layer.post_attention_layernorm(out))
        result = torch.empty_like(out)
        failed = kernels.sparse_step(
            kernels.pool,
            self._sparse_address,
            out.data_ptr(),
            self._chosen_address,
            self._shares_address,
            result.data_ptr(),
        )
        if failed:
            raise _out_of_memory()
        return result


def _attention_struct(layer: Any) -> AttentionStruct:
    attention = layer.self_attn
    norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
    return AttentionStruct(
        layer.input_layernorm.weight.data_ptr(),
        *(norm.weight.data_ptr() if norm is not None else None for norm in norms),
        *(linear_struct(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)),
        layer.input_layernorm.variance_epsilon,
        attention.scaling,
        attention.q_proj.in_features,
        attention.q_proj.out_features // attention.head_dim,
        attention.k_proj.out_features // attention.head_dim,
        attention.head_dim,
    )


def _sparse_struct(layer: Any) -> SparseBlockStruct | None:
    """The layer's sparse block, or `None` if it is dense or its experts are not computed natively."""
    block = layer.mlp
    if type(block) not in _SPARSE_BLOCKS or not _is_plain(block.gate.weight):
        return None
    bound = getattr(block.experts, "_switchyard_bank_layer", None)
    if bound is None or not isinstance(bound[1], NativeExperts):
        return None
    is_qwen = isinstance(block, qwen3_moe.Qwen3MoeSparseMoeBlock)
    return SparseBlockStruct(
        layer.post_attention_layernorm.weight.data_ptr(),
        block.gate.weight.data_ptr(),
        bound[1].struct,
        layer.post_attention_layernorm.variance_epsilon,
        block.gate.top_k,
        bool(block.gate.norm_topk_prob) if is_qwen else True,
        is_qwen,
    )


def _out_of_memory() -> EngineError:
    return EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There was no memory left to compute a layer.")
