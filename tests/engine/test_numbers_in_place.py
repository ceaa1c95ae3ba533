"""Safetensors in the numbers that a model computes with are used where they lie: no parameter is a copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint.headers import read_header
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.experts.file_image import EARLY_READS, FileImage
from engine.runtime.load import weights
from engine.runtime.load.model import load_model
from tests.engine.near_ties import choosing, routes_of
from tests.engine.test_family_parity import greedy, loaded, logits
from tests.engine.tiny_families import tiny_checkpoint


def _load(folder: Path, precision: str) -> tuple[torch.Tensor, list[int], tuple[Path, ...], int]:
    """Logits, tokens, the files that were held as a whole, and the number of places from which parameters lie as in the
    file."""
    loaded = load_model(
        EngineConfig(str(folder), device="cpu", precision=precision),
        on_progress=lambda done, total: _told.append((done, total)),
        cancelled=lambda: False,
    )
    try:
        with torch.no_grad():
            own, entries = dict(loaded.model.named_parameters()), read_header(folder / "model.safetensors")
            places = {own[name].data_ptr() - entry.offset for name, entry in entries.items() if name in own}
            return logits(loaded.model), greedy(loaded.model)[0].tolist(), loaded.prepared, len(places)
    finally:
        loaded.close()


_told: list[tuple[int, int]] = []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_dense_model(family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(family, tmp_path / family, dtype=dtype)
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    monkeypatch.setattr(weights, "_MOSTLY", 0.0)  # of a file so small, the header is much
    _told.clear()
    found, tokens, files, places = _load(folder, precision)
    assert files == (folder / "model.safetensors",)
    assert _told[-1][0] == _told[-1][1] > 0
    assert all(done <= total for done, total in _told)
    monkeypatch.setattr(weights, "_MOSTLY", 2.0)
    wanted, same_tokens, files, copies = _load(folder, precision)
    assert files == ()
    assert places == 1 < copies
    assert torch.equal(found, wanted)
    assert tokens == same_tokens


def test_of_other_numbers_files_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama", dtype=torch.float32)
    monkeypatch.setattr(weights, "_MOSTLY", 0.5)
    assert _load(folder, "bf16")[2] == ()


def test_a_file_that_is_cut_short_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama", dtype=torch.bfloat16)
    monkeypatch.setattr(weights, "_MOSTLY", 0.0)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(EngineError, match=r"model\.safetensors") as caught:
        _load(folder, "bf16")
    assert caught.value.code is ErrorCode.CHECKPOINT_DAMAGED


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shard", ["1GB", "60KB"], ids=["one file", "many"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "llama"])
def test_numbers_in_16_bits(
    family: str, shard: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside PyTorch's own linear layers in fp32, which are of the same weights: no other copy of those, and no other
    numbers; of experts one by one only those in two files are copied."""
    experts = {
        "mixtral": {"num_local_experts": 16},
        "qwen3_moe": {"num_experts": 16},
        "deepseek_v3": {"n_routed_experts": 16},
    }
    folder = tiny_checkpoint(
        family, tmp_path / family, dtype=dtype, save={"max_shard_size": shard}, **experts.get(family, {})
    )
    files = sorted(folder.glob("*.safetensors"))
    monkeypatch.setattr(weights, "_MOSTLY", 0.0)
    images: list[FileImage] = []
    take = EARLY_READS.take
    monkeypatch.setattr(EARLY_READS, "take", lambda path: images.append(take(path)) or images[-1])
    with loaded(folder, "bf16") as ours, torch.no_grad():
        assert sorted(ours.prepared) == files
        starts = [(np.frombuffer(image.bytes, np.uint8).ctypes.data, len(image.bytes)) for image in images]
        own = [each for each in (*ours.model.parameters(), *ours.model.buffers()) if each.numel() >= 1024]
        rows = (
            [row for layer in ours.bank.layers.values() for each in layer.rows.values() for row in each]
            if ours.bank
            else []
        )
        copied = [each for each in (*own, *rows) if not any(0 <= each.data_ptr() - at < size for at, size in starts)]
        few = ("gate.weight", "router.weight")
        names = {id(each): name for name, each in ours.model.named_parameters()}
        copied = [each for each in copied if not names.get(id(each), "").endswith(few)]
        assert sum(each.nbytes for each in copied) <= (
            0 if shard == "1GB" else 0.2 * sum(f.stat().st_size for f in files)
        )
        with routes_of(ours.model) as routes:
            found = logits(ours.model)[0].float()
    with loaded(folder, "fp32") as reference, torch.no_grad(), choosing(reference.model, routes) as ties:
        wanted = logits(reference.model)[0]
    assert max(ties, default=0.0) < 0.03
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 0.02
