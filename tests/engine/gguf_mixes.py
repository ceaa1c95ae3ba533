"""Makes the files of tests/data/gguf that llama.cpp quantised: `python -m tests.engine.gguf_mixes [MIX ...]`.

For maintainers, after `python -m benchmarks.peers build`.  A tiny random Qwen3 MoE whose rows are whole blocks of
256 is quantised by llama.cpp to each of its mixes of types; beside each file lies what ggml makes of its blocks, and
what llama.cpp computes with it.  Matrices are made of few blocks, so that the files compress.
"""

import ctypes
import json
import lzma
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.editions import LLAMA_CPP
from benchmarks.peers.peer import chosen_types
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.headers import TensorEntry
from engine.formats.ggml import GGML
from tests.engine.gguf_files import DATA, VOCABULARY, as_llama_cpp_computes, save_tokenizer
from tests.tiny_gguf import write_model

MIXES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
         "MXFP4_MOE", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_M", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0",
         "Q1_0", "Q2_0")  # fmt: skip
_HIDDEN, _WIDTH, _BLOCK = 512, 256, 256
_POOL = 32
_RUN = 8
"""Rows whose blocks follow each other in the pool, in matrices whose rows need not all differ."""


def main(mixes: list[str]) -> None:
    """Makes these files, or all."""
    DATA.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = _plain(folder)
        for mix in mixes or MIXES:
            _make(mix, plain, folder)


def named(mix: str) -> str:
    """The name of a file of this mix, without its endings."""
    return f"qwen3moe-{mix}"


def checked_sum(values: NDArray[np.float32]) -> float:
    """A sum in which every number has a weight of its own."""
    flat = values.reshape(-1).astype(np.float64)
    return float(flat @ np.cos(np.arange(flat.size)))


def blocks_of(entry: TensorEntry) -> NDArray[np.uint8]:
    """The bytes of a tensor, [..., bytes of a row]."""
    raw = np.fromfile(entry.file, np.uint8, entry.nbytes, offset=entry.offset)
    return raw.reshape(*entry.shape[:-1], -1)


def _plain(folder: Path) -> Path:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=_HIDDEN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=_WIDTH, moe_intermediate_size=_WIDTH, num_experts=3, num_experts_per_tok=2,
        max_position_embeddings=512, norm_topk_prob=True, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float()
    random = np.random.default_rng(11)
    pool = random.standard_normal((_POOL, _BLOCK), dtype=np.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                values = 1 + 0.125 * random.integers(-2, 3, parameter.shape)
            elif key.endswith("mlp.gate.weight"):
                values = random.choice([-1.5, -0.5, 0.5, 1.5], parameter.shape) * (4 / _HIDDEN**0.5)
            else:
                run = 1 if "embed" in key or "lm_head" in key else _RUN
                values = _of_blocks(pool, tuple(parameter.shape), run, random) * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.from_numpy(np.asarray(values, np.float32)))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return write_model(folder, folder / "plain.gguf", "qwen3moe")


def _of_blocks(
    pool: NDArray[np.float32], shape: tuple[int, ...], run: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """A matrix of this shape whose rows are blocks of the pool."""
    rows, across = int(np.prod(shape[:-1])), shape[-1] // _BLOCK
    picked = random.choice(_POOL**across, rows // run, replace=run > 1)
    begins = np.stack(np.unravel_index(picked, (_POOL,) * across), -1)
    return pool[(begins[:, None] + np.arange(run)[:, None]).reshape(rows, across) % _POOL].reshape(shape)


def _make(mix: str, plain: Path, folder: Path) -> None:
    file = folder / f"{named(mix)}.gguf"
    chosen_types(plain, mix, file)
    stored = read_gguf(file).tensors
    sums, apart = {}, 0.0
    for name, entry in stored.items():
        theirs = _as_ggml_unpacks(entry)
        ours = GGML[entry.dtype].dequantise(blocks_of(entry)).reshape(entry.shape)
        apart = max(apart, float(np.abs(theirs - ours).max() / np.abs(theirs).max()))
        sums[name] = checked_sum(theirs)
    content = as_llama_cpp_computes(file, folder) | {
        "types": {name: entry.dtype for name, entry in stored.items()},
        "sums": sums,
    }
    (DATA / f"{named(mix)}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    packed = DATA / f"{named(mix)}.gguf.xz"
    packed.write_bytes(lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    file.unlink()
    kinds = sorted({entry.dtype for entry in stored.values()})
    report = (
        f"{mix:10} {packed.stat().st_size:7,} bytes, {', '.join(kinds)}; ggml's numbers and ours: {apart:.1e} apart"
    )
    sys.stdout.write(f"{report}, least margin {min(content['margins']):.4f}\n")
    sys.stdout.flush()


class _Traits(ctypes.Structure):
    """The beginning of `ggml_type_traits`."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


def _as_ggml_unpacks(entry: TensorEntry) -> NDArray[np.float32]:
    raw = blocks_of(entry)
    if entry.dtype == "F32":
        return raw.view(np.float32).reshape(entry.shape)
    library = ctypes.CDLL(str(LLAMA_CPP.home() / "build" / "bin" / "libggml-base.so"))
    library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
    traits = library.ggml_get_type_traits(GGML[entry.dtype].id).contents
    assert traits.type_name.decode().lower() == entry.dtype.lower()
    values = np.empty(entry.shape, np.float32)
    traits.to_float(raw.ctypes.data, values.ctypes.data, values.size)
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
