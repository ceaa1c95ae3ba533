"""The dense parent, SmolLM2-135M-Instruct, read from its GGUF file and dequantised tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from engine.checkpoint.bfloat16 import Float32
from engine.checkpoint.starter.recipe import Dimensions

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
