"""Models that are quantised already run as they are stored: codes kept, formats mixed within layers and between."""

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint.gguf.file import read_gguf
from engine.common import footprint
from engine.common.config import EngineConfig
from engine.common.errors import RequestCancelled, never_cancelled
from engine.experts.direct_file import DirectFile
from engine.formats import STORED
from engine.formats.ggml import GGML
from engine.formats.tiles import RecordLayout, TiledMatrix, TiledShape, dequantise
from engine.kernels.native.linear import QuantisedLinear
from engine.kernels.repack import Blocks, repack
from engine.runtime.fast_path.attention import GroupedAttention
from engine.runtime.load import records as making
from engine.runtime.load.model import load_model
from tests.engine.loaded_tiny import opened_model
from tests.engine.test_disk_backed import on_disk
from tests.engine.test_family_parity import decoded_logits, greedy, logits
from tests.engine.tiny_families import tiny_checkpoint
from tests.k_quants import quantise_k
from tests.tiny_gguf import write_model

SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "vocab_size": 512}
TYPES = {
    "blk.0.ffn_gate_exps": "Q4_K",
    "blk.0.ffn_up_exps": "Q4_K",
    "blk.0.ffn_down_exps": "Q6_K",
    "blk.1.ffn_gate_exps": "Q4_0",
    "blk.1.ffn_up_exps": "Q8_0",
    "blk.1.ffn_down_exps": "MXFP4",
    "attn_v": "Q6_K",
    "output": "Q6_K",
}
"""By parts of names; everything else is Q4_K, as in the files that people share."""
FORMATS = ({"gate_up_proj": "int4", "down_proj": "int8"}, {"gate_up_proj": "int8", "down_proj": "lut4"})


def type_of(name: str) -> str:
    return next((kind for part, kind in TYPES.items() if part in name), "Q4_K")


@pytest.fixture(autouse=True)
def without_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of files that do not lie as kernels read them."""
    monkeypatch.setattr("engine.runtime.load.plan.lies_in_place", lambda *_: False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tiny_checkpoint(
        "qwen3_moe", tmp_path / "checkpoint", use_sliding_window=False, norm_topk_prob=True, **SIZES
    )
    return write_model(folder, tmp_path / "model.gguf", "qwen3moe", quantised=type_of)


def layouts(bank: Any) -> list[RecordLayout]:
    found = [layer.layout for layer in bank.layers.values()]
    assert all(layout.tiled for layout in found)
    return found


def expected(file: Path, part: str, shape: TiledShape, layer: int, expert: int) -> TiledMatrix:
    """A matrix of an expert, made of the file's blocks."""
    sources = []
    for name in ("gate", "up") if part == "gate_up_proj" else ("down",):
        entry = read_gguf(file).tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
        raw = np.fromfile(entry.file, np.uint8, entry.nbytes, offset=entry.offset)
        rows = torch.from_numpy(raw).view(*entry.shape[:-1], -1)[expert].contiguous()
        sources.append(Blocks(GGML[entry.dtype], rows))
    made = TiledMatrix.empty(shape)
    repack([(tuple(sources), made)], None)
    return made


def near(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    """As near as activations in 8 bits allow, but for a token that chooses between two experts which score alike:
    which of them it takes is a matter of the last bit, and of the processor.
    """
    errors = (ours.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return bool((errors < 0.05).float().mean() > 0.9)


def test_each_matrix_is_in_the_format_that_keeps_it(file: Path) -> None:
    with opened_model(file, "fp32") as exact, torch.no_grad():
        wanted = logits(exact.model)
    with opened_model(file, "auto") as model, torch.no_grad():
        assert model.info.precision == STORED
        for index, (layer, layout) in enumerate(zip(model.bank.layers.values(), layouts(model.bank), strict=True)):
            assert {name: each.name for name, each in layout.tiled} == FORMATS[index]
            for expert in (0, layer.num_experts - 1):
                for name, _ in layout.tiled:
                    ours = layout.matrix(layer.rows, name, expert)
                    assert torch.equal(dequantise(ours), dequantise(expected(file, name, ours.shape, index, expert)))
        assert near(logits(model.model), wanted)
        tokens = greedy(model.model, 8)
    with opened_model(file, "bf16") as plain, torch.no_grad():
        assert near(logits(plain.model), wanted)
        assert tokens.shape == greedy(plain.model, 8).shape


def test_dense_layers_keep_their_codes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "head_dim": 64, "num_key_value_heads": 4}
    folder = tiny_checkpoint("llama", tmp_path / "checkpoint", **sizes)  # rows of queries and keys in another order
    file = write_model(folder, tmp_path / "model.gguf", "llama", quantised=type_of)
    with opened_model(file, "fp32") as exact, opened_model(file, "auto") as model, torch.no_grad():
        assert model.info.precision == STORED
        forwards = {name: module.__dict__.get("forward") for name, module in model.model.named_modules()}
        kept = {name: each for name, each in forwards.items() if isinstance(each, QuantisedLinear)}
        assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"} <= kept.keys()
        for name, linear in kept.items():
            own = exact.model.get_submodule(name).weight
            close = {"int4": 0.03, "int8": 0.01}[linear.matrix.shape.format.name]
            assert (dequantise(linear.matrix, torch.float32) - own).abs().max() <= close * own.abs().max()
        assert near(logits(model.model), logits(exact.model))
        # Queries and keys in 4 bits, values in 8: one kernel computes all of the attention.
        assert GroupedAttention.can_step(model.model.model.layers[0])
        for step, wanted in zip(decoded_logits(model.model), decoded_logits(exact.model), strict=True):
            assert near(step, wanted)


@pytest.fixture
def dense_file(tmp_path: Path) -> Path:
    """Most of its bytes are in layers that are kept, the head among them."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 512, "head_dim": 64, "num_key_value_heads": 4}
    folder = tiny_checkpoint("qwen3", tmp_path / "checkpoint", tie_word_embeddings=False, **sizes)
    return write_model(folder, tmp_path / "model.gguf", "qwen3", quantised=type_of)


def test_what_a_file_stores_is_read_once(dense_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, told = [], list[tuple[int, int]]()
    into = DirectFile.read_into

    def counted(self: DirectFile, offset: int, target: memoryview) -> None:
        read.append(len(target))
        into(self, offset, target)

    monkeypatch.setattr(DirectFile, "read_into", counted)
    config = EngineConfig(model=str(dense_file), device="cpu")
    loaded_model = load_model(config, on_progress=lambda *now: told.append(now), cancelled=never_cancelled)
    loaded_model.close()
    stored = sum(entry.nbytes for entry in read_gguf(dense_file).tensors.values())
    assert sum(read) == stored
    assert told[-1] == (stored, stored)
    assert told == sorted(told)


def test_layers_that_are_kept_can_be_cancelled_to_the_last(dense_file: Path) -> None:
    config = EngineConfig(model=str(dense_file), device="cpu")

    def load(until: int) -> int:
        asked = itertools.count()
        try:
            load_model(config, on_progress=lambda *_: None, cancelled=lambda: next(asked) >= until).close()
        except RequestCancelled:
            return -1
        return next(asked)

    times = load(sys.maxsize)
    assert times >= len(read_gguf(dense_file).tensors)  # each tensor asks
    assert load(times) == times
    assert [load(until) for until in (0, times // 2, times - 1)] == [-1, -1, -1]


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says how much memory there was")
def test_loading_takes_little_more_memory_than_the_model(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "vocab_size": 512,
        "head_dim": 64,
        "num_key_value_heads": 4,
    }
    folder = tiny_checkpoint("llama", tmp_path / "checkpoint", **sizes)
    file = write_model(folder, tmp_path / "model.gguf", "llama", quantised=lambda _name: "Q4_0")
    with opened_model(file, "auto"):
        pass  # what is imported and kept from then on

    def memory(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the most so far is forgotten
    before = memory("VmRSS")
    with opened_model(file, "auto") as model:
        assert model.info.precision == STORED
        in_bf16 = 2 * model.info.parameters
        # Two rooms for what is read; in bf16 alone, weights would take more.
        assert memory("VmHWM") - before < model.info.weights_bytes + 2 * footprint.REPACKED_BYTES + 2**26 < in_bf16


def test_experts_are_the_same_from_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_model(file, "auto") as in_ram, torch.no_grad():
        wanted = logits(in_ram.model)
    with on_disk(monkeypatch, file, "auto") as model, torch.no_grad():
        assert model.info.precision == STORED
        assert near(logits(model.model), wanted.float())


def test_experts_are_the_same_on_a_card(file: Path) -> None:
    with opened_model(file, "auto") as in_ram, torch.no_grad():
        wanted = logits(in_ram.model)
    with opened_model(file, "auto", device="emulated:slow-link") as model, torch.no_grad():
        assert model.info.precision == STORED
        assert near(logits(model.model), wanted.float())


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_another_precision_is_made_of_the_exact_values(file: Path, precision: str) -> None:
    with opened_model(file, "fp32") as exact, torch.no_grad():
        wanted = logits(exact.model)
    with opened_model(file, precision) as model, torch.no_grad():
        assert model.info.precision == precision
        error = (logits(model.model).float() - wanted).norm() / wanted.norm()
        assert error < {"int8": 0.05, "int4": 0.2}[precision]


def test_few_bytes_are_read_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in one batch, the records are the same."""
    records = []
    for batch in (1, 2**30):
        monkeypatch.setattr(making, "_BATCH", batch)
        with opened_model(file, "auto") as model:
            records.append([layer.records.clone() for layer in model.bank.layers.values()])
    assert all(torch.equal(one, other) for one, other in zip(*records, strict=True))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_of_these_tests_are_ggmls(kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((6, 512), np.float32)
    error = GGML[kind].dequantise(quantise_k(values, kind)) - values
    assert np.abs(error).max() < {"Q4_K": 0.3, "Q6_K": 0.08}[kind]
