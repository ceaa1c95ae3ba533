"""Derives checkpoints from the dense parent: dense Llama, MoE with all experts active, and the sparse starter.

The parent, SmolLM2-135M-Instruct, is read from its GGUF file and dequantised tensor by tensor. Tensor names are those
of the published Mixtral layout (`block_sparse_moe.experts.E.w1/w2/w3`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.gguf.checkpoint import gguf_tensors
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.packed import PackedEntry, as_array, unpacked
from engine.checkpoint.safetensors_numpy import Float32, Tensors, from_bfloat16, to_bfloat16
from engine.checkpoint.starter.package import Dimensions

_LAYER_NAMES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


class DenseParent:
    """Weights of the parent under transformers' Llama names, float32, dequantised on demand.

    Raises:
        EngineError: the file is not the model that it should be.
    """

    def __init__(self, gguf_path: Path) -> None:
        self.file = read_gguf(gguf_path)
        self._tensors = gguf_tensors(self.file)

    def embedding(self) -> Float32:
        """[vocabulary, hidden]; also the output head (tied)."""
        return self._values("model.embed_tokens")

    def final_norm(self) -> Float32:
        """[hidden]"""
        return self._values("model.norm")

    def layer(self, index: int) -> LayerTensors:
        """Tensors of one decoder layer, `[out, in]`, keyed like `self_attn.q_proj`."""
        return {name: self._values(f"model.layers.{index}.{name}") for name in _LAYER_NAMES}

    def _values(self, name: str) -> Float32:
        entry = self._tensors[f"{name}.weight"]
        sources = entry.sources if isinstance(entry, PackedEntry) else (entry,)
        raw = [np.fromfile(each.file, np.uint8, each.nbytes, offset=each.offset) for each in sources]
        arrays = [as_array(source, array) for source, array in zip(sources, raw, strict=True)]
        return np.concatenate(list(unpacked(entry, arrays)))


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
