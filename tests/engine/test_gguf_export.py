"""GGUF files hold the checkpoint's weights, under llama.cpp's names, in its orders and types."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.gguf import gguf_of
from engine.checkpoint.gguf.export import Quantisation, write_gguf
from engine.checkpoint.packed import read_safetensors, write_safetensors
from engine.checkpoint.synthetic import make_synthetic
from engine.common.errors import ErrorCode
from engine.formats.coded import from_bfloat16
from tests.refusals import refused

SHAPE = "synthetic:qwen3-moe-tiny?layers=1&vocab=259"
LARGEST_ERROR = {
    Quantisation.BF16: 0.0,
    Quantisation.Q8_0: 1 / 254,
    Quantisation.Q4_0: 1 / 7.5,
    Quantisation.Q4_1: 1 / 14,
}
"""Largest error over the largest number of a group: half a step."""


def tensors_in(path: Path) -> dict[str, NDArray[Any]]:
    """Every tensor of a GGUF file as float32, in the shape that numpy gives it (outermost dimension first)."""
    found = {}
    for tensor in GGUFReader(path).tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        found[tensor.name] = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return found


def tensors_of(checkpoint: Path) -> dict[str, NDArray[Any]]:
    tensors = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors |= {name: from_bfloat16(bits) for name, bits in read_safetensors(file).items()}
    return tensors


def llama_checkpoint(folder: Path, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int) -> Path:
    """A dense model of one layer with random float32 weights and tied embeddings."""
    hidden, inner, vocab = 32, 64, 40
    shapes = {
        "model.embed_tokens": (vocab, hidden),
        "model.layers.0.self_attn.q_proj": (heads * head_dim, hidden),
        "model.layers.0.self_attn.k_proj": (kv_heads * head_dim, hidden),
        "model.layers.0.self_attn.v_proj": (kv_heads * head_dim, hidden),
        "model.layers.0.self_attn.o_proj": (hidden, heads * head_dim),
        "model.layers.0.mlp.gate_proj": (inner, hidden),
        "model.layers.0.mlp.up_proj": (inner, hidden),
        "model.layers.0.mlp.down_proj": (hidden, inner),
        "model.layers.0.input_layernorm": (hidden,),
        "model.layers.0.post_attention_layernorm": (hidden,),
        "model.norm": (hidden,),
    }
    weights = {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", weights)
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("quantisation", Quantisation)
def test_experts_are_stacked_in_order_and_within_half_a_step(quantisation: Quantisation, tmp_path: Path) -> None:
    checkpoint = make_synthetic(SHAPE)
    write_gguf(checkpoint, tmp_path / "model.gguf", quantisation)
    theirs, ours = tensors_of(checkpoint), tensors_in(tmp_path / "model.gguf")
    for name, source in {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.items():
        wanted = np.stack([theirs[f"model.layers.0.mlp.experts.{expert}.{source}.weight"] for expert in range(16)])
        written = ours[f"blk.0.ffn_{name}_exps.weight"]
        groups = np.abs(wanted).reshape(-1, 32)
        error = np.abs(wanted - written).reshape(-1, 32)
        # Scales are float16, which moves the largest numbers besides.
        allowed = LARGEST_ERROR[quantisation] + (quantisation is not Quantisation.BF16) * 2**-10
        assert (error <= allowed * groups.max(1, keepdims=True)).all()
    assert np.array_equal(ours["blk.0.ffn_gate_inp.weight"], theirs["model.layers.0.mlp.gate.weight"])
    assert np.array_equal(ours["blk.0.attn_q_norm.weight"], theirs["model.layers.0.self_attn.q_norm.weight"])
    assert len(ours) == len(theirs) - 3 * 16 + 3


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]), half=st.integers(1, 5))
def test_neighbours_in_the_file_are_halves_apart_in_the_checkpoint(
    data: st.DataObject, heads: tuple[int, int], half: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    folder = tmp_path_factory.mktemp("llama")
    checkpoint = llama_checkpoint(folder / "model", rng, *heads, 2 * half)
    write_gguf(checkpoint, folder / "model.gguf", Quantisation.BF16)
    theirs, ours = read_safetensors(checkpoint / "model.safetensors"), tensors_in(folder / "model.gguf")
    assert "output.weight" not in ours  # tied
    for short, count in zip("qk", heads, strict=True):
        wanted = theirs[f"model.layers.0.self_attn.{short}_proj.weight"].reshape(count, 2, half, -1)
        written = ours[f"blk.0.attn_{short}.weight"].reshape(count, half, 2, -1)
        np.testing.assert_allclose(written[:, :, 0], wanted[:, 0], rtol=2**-8)
        np.testing.assert_allclose(written[:, :, 1], wanted[:, 1], rtol=2**-8)
    np.testing.assert_allclose(
        ours["blk.0.attn_v.weight"], theirs["model.layers.0.self_attn.v_proj.weight"], rtol=2**-8
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "dbrx"}, "no place|dbrx"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"num_hidden_layers": 2}, "model.layers.1."),
        ({"num_experts": 15}, "experts.15."),
    ],
)
def test_what_llama_cpp_would_compute_differently_is_refused(change: dict[str, Any], named: str) -> None:
    checkpoint = make_synthetic(SHAPE)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    (checkpoint / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    with refused(ErrorCode.MODEL_UNSUPPORTED, match=named):
        gguf_of(checkpoint, Quantisation.BF16)
