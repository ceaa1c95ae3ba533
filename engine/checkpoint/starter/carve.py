"""Derives checkpoints from the dense parent: dense Llama, MoE with all experts active, and the sparse starter.

The parent, SmolLM2-135M-Instruct, is read from its GGUF file and dequantised tensor by tensor. Tensor names are those
of the published Mixtral layout (`block_sparse_moe.experts.E.w1/w2/w3`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.safetensors_numpy import Float32, Tensors, from_bfloat16, to_bfloat16
from engine.checkpoint.starter.package import Dimensions

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


class DenseParent:
    """Weights of the parent under transformers' Llama names, float32, dequantised on demand."""

    def __init__(self, gguf_path: Path, dimensions: Dimensions) -> None:
        import gguf

        self._reader = gguf.GGUFReader(gguf_path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._heads = {"attn_q": dimensions.attention_heads, "attn_k": dimensions.kv_heads}

    def close(self) -> None:
        """Unmaps the file, so that it can be deleted on every platform."""
        self._tensors.clear()
        del self._reader

    def embedding(self) -> Float32:
        """[vocabulary, hidden]; also the output head (tied)."""
        return self._dequantise("token_embd")

    def final_norm(self) -> Float32:
        """[hidden]"""
        return self._dequantise("output_norm")

    def layer(self, index: int) -> dict[str, Float32]:
        """Tensors of one decoder layer, `[out, in]`, keyed like `self_attn.q_proj`."""
        return {name: self._layer_tensor(index, short) for name, short in _LAYER_NAMES.items()}

    def metadata(self, key: str) -> Any:
        """A metadata value of the file as plain Python.  KeyError if absent."""
        return self._reader.fields[key].contents()

    def _layer_tensor(self, index: int, short: str) -> Float32:
        weight = self._dequantise(f"blk.{index}.{short}")
        heads = self._heads.get(short)
        return weight if heads is None else _half_split_rotary(weight, heads)

    def _dequantise(self, name: str) -> Float32:
        import gguf

        tensor = self._tensors[f"{name}.weight"]
        return cast(Float32, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False))


def _half_split_rotary(weight: Float32, heads: int) -> Float32:
    """Undo llama.cpp's row order for rotary embeddings (pairs interleaved) in favour of transformers' (halves).

    Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py, inverted.
    """
    rows, columns = weight.shape
    interleaved = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(interleaved.swapaxes(1, 2)).reshape(rows, columns)


_COLUMNS_PER_SCALE = 32

LayerTensors = dict[str, Float32]
LayerRule = Callable[[int, LayerTensors], LayerTensors]
"""Turns the parent's layer of that index into the tensors to write."""

Encoder = Callable[[Float32], NDArray[Any]]


def assemble(
    parent: DenseParent, dimensions: Dimensions, rule: LayerRule, final_norm: Float32, encode: Encoder
) -> Tensors:
    """All tensors of a checkpoint, encoded (`to_bfloat16`, or unchanged for float32)."""
    tensors: Tensors = {"model.embed_tokens.weight": encode(parent.embedding())}
    for index in range(dimensions.layers):
        for name, weight in rule(index, parent.layer(index)).items():
            tensors[f"model.layers.{index}.{name}.weight"] = encode(weight)
    tensors["model.norm.weight"] = encode(final_norm)
    return tensors


def dense_layer(_index: int, parent: LayerTensors) -> LayerTensors:
    """The parent's layer, unchanged."""
    return parent


def all_active_rule(dimensions: Dimensions) -> LayerRule:
    """Experts are slices of the parent's FFN, all of them active, each weighted 1/E by a zero router.

    The down projection is scaled by E to compensate, so the layer computes the same as the parent's.
    """

    def rule(_index: int, parent: LayerTensors) -> LayerTensors:
        tensors = {name: weight for name, weight in parent.items() if not name.startswith("mlp.")}
        tensors["block_sparse_moe.gate"] = np.zeros((dimensions.experts, dimensions.hidden), np.float32)
        gate, up, down = (parent[f"mlp.{part}_proj"] for part in ("gate", "up", "down"))
        return tensors | _experts(gate, up, down * np.float32(dimensions.experts), dimensions)

    return rule


def sparse_rule(dimensions: Dimensions, delta: Tensors) -> LayerRule:
    """The starter: neurons regrouped, low-rank changes added, down projection refitted for top-k routing.

    `delta` is `starter-delta.safetensors`; its tensors are described in resources/starter/CARD.md.
    """
    sizes = (dimensions.hidden, dimensions.kv_heads * dimensions.head_dim, dimensions.kv_heads * dimensions.head_dim)
    bounds = np.cumsum(sizes)[:-1].tolist()

    def rule(index: int, parent: LayerTensors) -> LayerTensors:
        def low_rank(part: str) -> Float32:
            b, a = (from_bfloat16(delta[f"layers.{index}.{part}.{side}"]) for side in "BA")
            return b @ a

        def stored(part: str) -> Float32:
            return from_bfloat16(delta[f"layers.{index}.{part}"])

        order = delta[f"layers.{index}.perm"].astype(np.intp)
        query, key, value = np.split(low_rank("qkv"), bounds)
        gate, up = np.split(low_rank("gate_up"), 2)
        down = parent["mlp.down_proj"][:, order] + _four_bit(
            delta[f"layers.{index}.down_delta.q4"], delta[f"layers.{index}.down_delta.scale"]
        )
        # Mixtral normalises the k chosen weights to sum to 1; the refit assumes they sum to k.
        down *= np.float32(dimensions.experts_per_token)
        return {
            "self_attn.q_proj": parent["self_attn.q_proj"] + query,
            "self_attn.k_proj": parent["self_attn.k_proj"] + key,
            "self_attn.v_proj": parent["self_attn.v_proj"] + value,
            "self_attn.o_proj": parent["self_attn.o_proj"] + low_rank("o"),
            "input_layernorm": stored("input_norm"),
            "post_attention_layernorm": stored("post_attention_norm"),
            "block_sparse_moe.gate": stored("router"),
        } | _experts(parent["mlp.gate_proj"][order] + gate, parent["mlp.up_proj"][order] + up, down, dimensions)

    return rule


def sparse_final_norm(delta: Tensors) -> Float32:
    """[hidden], in place of the parent's."""
    return from_bfloat16(delta["norm"])


def as_bfloat16(weight: Float32) -> NDArray[Any]:
    """Encoder for bfloat16 checkpoints."""
    return to_bfloat16(weight)


def as_float32(weight: Float32) -> NDArray[Any]:
    """Encoder for float32 checkpoints: a copy, since slices of one array must not share its memory."""
    return np.array(weight, dtype="<f4", order="C")


def _experts(gate: Float32, up: Float32, down: Float32, dimensions: Dimensions) -> LayerTensors:
    """Consecutive blocks of neurons: `gate`, `up` [neurons, hidden], `down` [hidden, neurons]."""
    tensors: LayerTensors = {}
    width = dimensions.expert_neurons
    for expert in range(dimensions.experts):
        block = slice(expert * width, (expert + 1) * width)
        prefix = f"block_sparse_moe.experts.{expert}"
        tensors[f"{prefix}.w1"] = gate[block]
        tensors[f"{prefix}.w2"] = down[:, block]
        tensors[f"{prefix}.w3"] = up[block]
    return tensors


def _four_bit(packed: NDArray[Any], scales: NDArray[Any]) -> Float32:
    """[rows, columns] from two values a byte (low nibble first, offset 8) and one scale per 32 columns."""
    rows, half = packed.shape
    values = np.stack((packed & 0x0F, packed >> 4), axis=-1).reshape(rows, 2 * half).astype(np.float32) - 8
    return values * np.repeat(scales.astype(np.float32), _COLUMNS_PER_SCALE, axis=1)
